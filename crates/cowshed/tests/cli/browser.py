# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Opens the page of a share in Chromium, waits for the digest, and clicks on the download.

Usage: browser.py BROWSER FOLDER URL. Prints what the page says, the name that the browser has for the download, and its lengths.
"""
import json
import os
import subprocess
import sys
import time

browser, folder, url = sys.argv[1:]
to_browser, commands = os.pipe()
answers, from_browser = os.pipe()
for number in (to_browser, from_browser):
    os.set_inheritable(number, True)
# The browser takes commands from descriptor 3, and answers on descriptor 4.
shell = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
options += ["--remote-debugging-pipe", f"--user-data-dir={folder}/profile", "about:blank"]
process = subprocess.Popen(
    ["bash", "-c", shell, browser, *options],
    pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
)
os.close(to_browser)
os.close(from_browser)
count = 0
events = []
pending = b""


def receive():
    global pending
    while b"\0" not in pending:
        more = os.read(answers, 65536)
        if not more:
            sys.exit("the browser has ended")
        pending += more
    text, _, pending = pending.partition(b"\0")
    return json.loads(text)


def call(method, session=None, **params):
    global count
    count += 1
    message = {"id": count, "method": method, "params": params}
    if session:
        message["sessionId"] = session
    os.write(commands, json.dumps(message).encode() + b"\0")
    while True:
        answer = receive()
        if answer.get("id") == count:
            if "error" in answer:
                sys.exit(f"{method}: {answer['error']}")
            return answer["result"]
        events.append(answer)


try:
    call("Browser.setDownloadBehavior", behavior="allow", downloadPath=folder, eventsEnabled=True)
    target = call("Target.createTarget", url="about:blank")["targetId"]
    session = call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def evaluate(text):
        return call("Runtime.evaluate", session, expression=text, returnByValue=True)["result"].get("value")

    end = time.monotonic() + 60
    while True:
        call("Page.navigate", session, url=url)
        digest = None
        while digest is None and time.monotonic() < end:
            digest = evaluate("document.readyState == 'complete' && document.getElementById('digest')?.textContent || null")
        if digest and len(digest) == 64:
            break
        if time.monotonic() > end:
            sys.exit(f"no digest: {digest!r}")
        time.sleep(0.1)
    for name in ("disk", "file", "digest"):
        print(name, evaluate(f"document.getElementById('{name}').textContent"))
    print("title", evaluate("document.title"))
    evaluate("document.getElementById('download').click()")
    while True:
        event = events.pop(0) if events else receive()
        if event.get("method") == "Browser.downloadWillBegin":
            print("name", event["params"]["suggestedFilename"])
        if event.get("method") == "Browser.downloadProgress":
            progress = event["params"]
            if progress["state"] != "inProgress":
                print(progress["state"], int(progress["receivedBytes"]), int(progress["totalBytes"]))
                break
    call("Browser.close")
finally:
    process.kill()
    process.wait()

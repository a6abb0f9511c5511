// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Processes of a test: the daemon, its clients, and a monitor's other end.

use cowshed_testkit::programs::tool;
use cowshed_testkit::waiting::{PATIENCE, await_that};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

pub const COWSHED: &str = env!("CARGO_BIN_EXE_cowshed");

pub fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// A process that is killed when the test ends early.
pub struct Killed(pub Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A running daemon.
pub struct Serving {
    process: Killed,
    log: PathBuf,
}

impl Serving {
    /// Starts `cowshed` with its folder as the current one; the log goes to the file `log` there.
    pub fn start(folder: &Path, arguments: &[&str]) -> Serving {
        let mut command = Command::new(COWSHED);
        command.args(arguments);
        Self::start_command(folder, command)
    }

    pub fn start_command(folder: &Path, mut command: Command) -> Serving {
        let log = folder.join("log");
        let errors = File::options().create(true).append(true).open(&log).expect("a log");
        command.current_dir(folder).env_remove("RUST_LOG").stdout(Stdio::piped()).stderr(errors);
        Serving { process: Killed(command.spawn().expect("our own binary runs")), log }
    }

    /// The next line of its output. A daemon that has ended has none.
    #[track_caller]
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        // One byte at a time: bytes behind the line are for the next call.
        let output = self.process.0.stdout.as_mut().expect("a pipe");
        let len = BufReader::with_capacity(1, output).read_line(&mut line).expect("text");
        assert!(len > 0, "the daemon has ended:\n{}", self.log());
        line.trim_end().to_owned()
    }

    pub fn child(&mut self) -> &mut Child {
        &mut self.process.0
    }

    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).expect("a log")
    }

    /// Waits for words in the log.
    pub fn await_log(&mut self, words: &str) {
        await_that(&format!("'{words}' in the log"), || {
            let is_there = self.log().contains(words);
            let ended = self.process.0.try_wait().expect("a child");
            assert!(is_there || ended.is_none(), "the daemon has ended without '{words}':\n{}", self.log());
            is_there
        });
    }

    pub fn signal(&self, signal: &str) {
        tool("kill", &[&format!("-{signal}"), &self.process.0.id().to_string()]);
    }

    pub fn wait(mut self) -> ExitStatus {
        self.process.0.wait().expect("it ends")
    }

    /// Ends it as a service manager does.
    pub fn stop(self) {
        self.signal("TERM");
        let log = self.log.clone();
        assert!(self.wait().success(), "{}", fs::read_to_string(log).expect("a log"));
    }
}

/// The page of metrics at an address that `serve` has printed.
pub fn page(line: &str) -> String {
    let address = line.strip_prefix("metrics: http://").and_then(|rest| rest.strip_suffix("/metrics"));
    let mut stream = TcpStream::connect(address.unwrap_or_else(|| panic!("{line}"))).expect("it listens");
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").expect("it reads");
    let mut page = String::new();
    stream.read_to_string(&mut page).expect("it answers");
    page
}

/// A monitor of a daemon.
pub struct Monitor(BufReader<UnixStream>);

impl Monitor {
    pub fn connect(path: &Path) -> Monitor {
        let mut monitor = Monitor(BufReader::new(UnixStream::connect(path).expect("the monitor listens")));
        monitor.message();
        monitor.command("qmp_capabilities", json!({}));
        monitor
    }

    fn message(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).expect("text");
        serde_json::from_str(&line).expect("JSON")
    }

    /// Sends a command; its reply is not awaited.
    pub fn send(&mut self, name: &str, arguments: &Value) {
        let text = json!({"execute": name, "arguments": arguments}).to_string();
        self.0.get_mut().write_all(text.as_bytes()).expect("the monitor reads");
    }

    pub fn reply(&mut self, name: &str, arguments: &Value) -> Value {
        self.send(name, arguments);
        self.answer()
    }

    /// The reply to the command that was sent last.
    pub fn answer(&mut self) -> Value {
        loop {
            let message = self.message();
            if message.get("event").is_none() {
                return message;
            }
        }
    }

    /// The data of the next event of this name. Other messages before it are passed over.
    #[track_caller]
    pub fn event(&mut self, name: &str) -> Value {
        self.0.get_ref().set_read_timeout(Some(PATIENCE)).expect("a socket");
        loop {
            let mut message = self.message();
            if message["event"] == name {
                return message["data"].take();
            }
        }
    }

    /// The result of a command that must work.
    #[track_caller]
    pub fn command(&mut self, name: &str, arguments: Value) -> Value {
        let mut reply = self.reply(name, &arguments);
        assert!(reply.get("return").is_some(), "{name} {arguments}: {reply}");
        reply["return"].take()
    }

    /// The error of a command that must be refused.
    #[track_caller]
    pub fn refusal(&mut self, name: &str, arguments: &Value) -> String {
        let reply = self.reply(name, arguments);
        let reason = reply["error"]["desc"].as_str();
        reason.unwrap_or_else(|| panic!("{name} {arguments} must be refused: {reply}")).to_owned()
    }

    /// The bytes that an export's clients have written.
    pub fn bytes_written(&mut self) -> u64 {
        let stats = self.command("query-blockstats", json!({}));
        stats[0]["stats"]["wr_bytes"].as_u64().unwrap_or_else(|| panic!("{stats}"))
    }

    /// Puts a new overlay on the image of the export `disk`.
    pub fn snapshot(&mut self, overlay: &Path) {
        let name = overlay.file_stem().expect("a name").to_str().expect("UTF-8");
        let arguments = json!({"device": "disk", "snapshot-file": overlay, "snapshot-node-name": name});
        self.command("blockdev-snapshot-sync", arguments);
        let nodes = self.command("query-named-block-nodes", json!({}));
        let is_there = nodes.as_array().expect("nodes").iter().any(|node| node["node-name"] == name);
        assert!(is_there, "{nodes}");
    }
}

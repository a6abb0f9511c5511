// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A daemon on a thread of its own, and a client that speaks QMP to it.

use cowshed_daemon::{
    Message, MonitorAddress, REQUEST_MEMORY_BYTES, STOP_LIMIT, Sender, Setup, Step, StopReason, TURN_LIMIT, run,
};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::JoinHandle;

pub struct Running {
    pub folder: tempfile::TempDir,
    pub control: Sender<Message>,
    pub metrics: Vec<String>,
    thread: JoinHandle<cowshed_types::Result<StopReason>>,
}

impl Running {
    /// A daemon with a monitor at `m.sock`, and further steps.
    pub fn start(steps: Vec<Step>) -> Running {
        let folder = temp_folder();
        Self::start_in(folder, steps)
    }

    /// A daemon with a new image of `bytes` as the node `q`, its export `e`, and a page of metrics.
    pub fn start_measured(bytes: u64) -> Running {
        let folder = temp_folder();
        Qemu::system().create(&folder.path().join("a.qcow2"), "qcow2", "", bytes);
        let path = |name: &str| folder.path().join(name).display().to_string();
        let node = format!("qcow2,node-name=q,file.driver=file,file.filename={}", path("a.qcow2"));
        let steps = vec![
            Step::metrics("--metrics", "127.0.0.1:0"),
            Step::blockdev(&node).expect("right"),
            Step::nbd_server(&format!("addr.type=unix,addr.path={}", path("n.sock"))).expect("right"),
            Step::export("nbd,id=e,node-name=q,name=q,writable=on").expect("right"),
        ];
        Self::start_in(folder, steps)
    }

    pub fn start_in(folder: tempfile::TempDir, steps: Vec<Step>) -> Running {
        Self::start_as(folder, setup(steps))
    }

    /// A daemon by `setup`, in a folder of its own.
    pub fn start_with(setup: Setup) -> Running {
        Self::start_as(temp_folder(), setup)
    }

    fn start_as(folder: tempfile::TempDir, mut setup: Setup) -> Running {
        setup.steps.push(Step::monitor_at("test", MonitorAddress::Unix(folder.path().join("m.sock")), false));
        let (sender, started) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            run(setup, |ready| {
                sender.send(ready.clone()).expect("the test waits");
                Ok(())
            })
        });
        match started.recv() {
            Ok(ready) => Running { folder, control: ready.control, metrics: ready.metrics, thread },
            Err(_) => panic!("the daemon did not start: {:?}", thread.join()),
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn client(&self) -> Client {
        Client::connect(&self.path("m.sock"))
    }

    /// Stops it as a signal does, and waits.
    pub fn stop(self) -> cowshed_types::Result<StopReason> {
        let _ = self.control.send(Message::Stop(StopReason::Signal(15)));
        self.join()
    }

    /// As [`Running::stop`]; the folder stays until it is dropped.
    pub fn keep_after_stop(self) -> (tempfile::TempDir, cowshed_types::Result<StopReason>) {
        let _ = self.control.send(Message::Stop(StopReason::Signal(15)));
        (self.folder, self.thread.join().expect("the daemon doesn't panic"))
    }

    pub fn join(self) -> cowshed_types::Result<StopReason> {
        self.thread.join().expect("the daemon doesn't panic")
    }
}

pub fn setup(steps: Vec<Step>) -> Setup {
    Setup {
        steps,
        queues: 2,
        vhost_queues: 1,
        stop_when_idle: false,
        stop_limit: Some(STOP_LIMIT),
        turn_limit: TURN_LIMIT,
        request_memory_bytes: REQUEST_MEMORY_BYTES,
        mount_guard: None,
    }
}

pub fn temp_folder() -> tempfile::TempDir {
    cowshed_testkit::qemu::temp_dir()
}

pub struct Client {
    reader: BufReader<UnixStream>,
    pub events: Vec<Value>,
    /// Where relative names of files are meant to be.
    folder: Option<PathBuf>,
}

impl Client {
    pub fn connect(path: &Path) -> Client {
        Self::on(UnixStream::connect(path).expect("the monitor listens"))
    }

    /// Takes the greeting and ends the negotiation.
    pub fn on(stream: UnixStream) -> Client {
        let mut client = Client { reader: BufReader::new(stream), events: Vec::new(), folder: None };
        assert!(client.message().expect("a greeting").get("QMP").is_some());
        client.command("qmp_capabilities", json!({}));
        client
    }

    pub fn send(&mut self, text: &str) {
        self.reader.get_mut().write_all(text.as_bytes()).expect("the monitor reads");
    }

    /// The next message; `None` when the daemon has hung up.
    pub fn message(&mut self) -> Option<Value> {
        let mut line = String::new();
        self.reader.read_line(&mut line).expect("the monitor speaks text");
        (!line.is_empty()).then(|| serde_json::from_str(&line).expect("the monitor speaks JSON"))
    }

    pub fn reply(&mut self) -> Value {
        loop {
            let message = self.message().expect("a reply");
            match message.get("event") {
                Some(_) => self.events.push(message),
                None => return message,
            }
        }
    }

    /// From now on relative names of files in arguments are those of this folder.
    pub fn files_in(&mut self, folder: &Path) {
        self.folder = Some(folder.to_owned());
    }

    /// A file of that folder.
    pub fn in_folder(&self, name: &str) -> String {
        self.folder.as_ref().expect("a folder").join(name).display().to_string()
    }

    fn place_files(&self, arguments: &mut Value) {
        let Some(folder) = &self.folder else { return };
        match arguments {
            Value::Object(map) => {
                for (key, value) in map {
                    match value {
                        Value::String(name)
                            if matches!(key.as_str(), "filename" | "path" | "snapshot-file")
                                || (key == "target" && name.ends_with(".qcow2")) =>
                        {
                            *name = folder.join(&*name).to_str().expect("text").to_owned();
                        }
                        other => self.place_files(other),
                    }
                }
            }
            Value::Array(items) => items.iter_mut().for_each(|item| self.place_files(item)),
            _ => {}
        }
    }

    pub fn execute(&mut self, name: &str, mut arguments: Value) -> Result<Value, Value> {
        self.place_files(&mut arguments);
        self.send(&json!({"execute": name, "arguments": arguments, "id": name}).to_string());
        let mut reply = self.reply();
        assert_eq!(reply["id"], name, "{reply}");
        match reply.get_mut("error") {
            Some(error) => Err(error.take()),
            None => Ok(reply["return"].take()),
        }
    }

    /// The result of a command that must work.
    pub fn command(&mut self, name: &str, arguments: Value) -> Value {
        self.execute(name, arguments.clone()).unwrap_or_else(|error| panic!("{name} {arguments}: {error}"))
    }

    /// The description of a command that must fail.
    pub fn refusal(&mut self, name: &str, arguments: Value) -> String {
        let error = self.execute(name, arguments.clone());
        let error = error.err().unwrap_or_else(|| panic!("{name} {arguments} must be refused"));
        error["desc"].as_str().expect("a text").to_owned()
    }

    /// Waits for an event of this name; its data.
    pub fn event(&mut self, name: &str) -> Value {
        loop {
            if let Some(at) = self.events.iter().position(|event| event["event"] == name) {
                return self.events.remove(at)["data"].take();
            }
            let message = self.message().expect("an event");
            assert!(message.get("event").is_some(), "{message}");
            self.events.push(message);
        }
    }
}

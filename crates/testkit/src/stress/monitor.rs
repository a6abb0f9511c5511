// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A blocking client of QMP.

use super::client::ANSWER_LIMIT_S;
use super::trace::Trace;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The result of a command.
#[derive(Debug)]
pub enum Answer {
    /// Its result.
    Done(Value),
    /// Its refusal.
    Refused(String),
    /// The monitor's other end is gone.
    Gone,
}

/// A monitor in command mode.
pub struct Monitor(BufReader<UnixStream>, Option<Arc<Trace>>);

impl Monitor {
    /// Connects to the socket `path` and leaves negotiation behind.
    ///
    /// # Errors
    /// The system's error.
    pub fn connect(path: &Path) -> std::io::Result<Monitor> {
        let socket = UnixStream::connect(path)?;
        socket.set_read_timeout(Some(Duration::from_secs(ANSWER_LIMIT_S)))?;
        let mut monitor = Monitor(BufReader::new(socket), None);
        let mut greeting = String::new();
        monitor.0.read_line(&mut greeting)?;
        match monitor.command("qmp_capabilities", &json!({})) {
            Ok(Answer::Done(_)) => Ok(monitor),
            other => Err(std::io::Error::other(format!("negotiation: {other:?}"))),
        }
    }

    /// Notes commands, and their results, from now on.
    pub fn trace(&mut self, trace: &Arc<Trace>) {
        self.1 = Some(Arc::clone(trace));
    }

    /// Runs a command; events before its answer are dropped.
    ///
    /// # Errors
    /// A sentence for a monitor that doesn't answer in time, or not in JSON.
    pub fn command(&mut self, name: &str, arguments: &Value) -> Result<Answer, String> {
        let trace = self.1.clone().filter(|_| !name.starts_with("query-"));
        if let Some(trace) = &trace {
            trace.note(&format!("{name} {arguments}"));
        }
        let answer = self.exchange(name, arguments);
        if let Some(trace) = &trace {
            let text = match &answer {
                Ok(Answer::Done(_)) => "done".to_owned(),
                other => format!("{other:?}"),
            };
            trace.note(&format!("{name}: {text}"));
        }
        answer
    }

    fn exchange(&mut self, name: &str, arguments: &Value) -> Result<Answer, String> {
        let text = json!({"execute": name, "arguments": arguments, "id": name}).to_string();
        if self.0.get_mut().write_all(text.as_bytes()).is_err() {
            return Ok(Answer::Gone);
        }
        loop {
            let mut line = String::new();
            match self.0.read_line(&mut line) {
                Ok(0) => return Ok(Answer::Gone),
                Err(error) if matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => {
                    return Err(format!("no answer to {name} {arguments} within {ANSWER_LIMIT_S} s"));
                }
                Err(_) => return Ok(Answer::Gone),
                Ok(_) => {}
            }
            let Ok(mut message) = serde_json::from_str::<Value>(&line) else {
                // A process that is killed may have sent half a line.
                return if line.ends_with('\n') { Err(format!("not JSON: {line}")) } else { Ok(Answer::Gone) };
            };
            if message.get("event").is_some() {
                continue;
            }
            return Ok(match message.get("return") {
                Some(_) => Answer::Done(message["return"].take()),
                None => match message["error"]["desc"].as_str() {
                    Some("the daemon is shutting down") => Answer::Gone,
                    reason => Answer::Refused(reason.unwrap_or("(no reason)").to_owned()),
                },
            });
        }
    }
}

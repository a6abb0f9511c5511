// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `--chardev`: where a monitor can be.

use crate::chardevs::{BackendOptions, ChardevOptions};
use crate::monitor::{LogOptions, MonitorAddress};
use cowshed_block::{Error, Result};
use cowshed_image::options::{BareKey, parse_list, parse_on_off, parse_size};
use std::collections::BTreeMap;

/// The character devices named so far.
#[derive(Clone, Debug, Default)]
pub struct Chardevs(BTreeMap<String, ChardevOptions>);

/// Options of a socket that say how a connection is made, with nothing to decide for us: they must say what we do.
const FIXED: &[(&str, bool)] =
    &[("server", true), ("wait", false), ("nowait", true), ("telnet", false), ("mux", false)];

/// Options without effect on a server.
const IGNORED: &[&str] = &["nodelay", "delay", "signal", "reconnect", "reconnect-ms", "ipv4", "ipv6"];

impl Chardevs {
    /// Takes `socket,id=ID,path=PATH,server=on,wait=off`, `socket,id=ID,host=HOST,port=PORT,server=on,wait=off`,
    /// `stdio,id=ID`, `null,id=ID` or `ringbuf,id=ID[,size=SIZE]`, each with `logfile=PATH`, `logappend=on`,
    /// `logtimestamp=on`. Returns the id and the device.
    pub(crate) fn add(&mut self, text: &str) -> Result<(String, ChardevOptions)> {
        self.parse(text).map_err(|error| error.file(format!("--chardev {text}")))
    }

    /// True when there is one with this id.
    pub fn contains(&self, id: &str) -> bool {
        self.0.contains_key(id)
    }

    fn parse(&mut self, text: &str) -> Result<(String, ChardevOptions)> {
        let refused = |message: String| Err(Error::invalid_argument(message));
        let first = text.split(',').next().unwrap_or_default();
        let text = if first.contains('=') { text.to_owned() } else { format!("backend={text}") };
        let mut pairs: BTreeMap<String, String> = parse_list(&text, BareKey::On)?.into_iter().collect();
        let Some(id) = pairs.remove("id") else { return refused("chardev: no id specified".into()) };
        let Some(backend) = pairs.remove("backend") else {
            return refused(format!("chardev: \"{id}\" missing backend"));
        };
        check_fixed(&mut pairs, backend == "socket")?;
        let log = log(&mut pairs)?;
        let backend = match backend.as_str() {
            "stdio" => BackendOptions::Place(MonitorAddress::Stdio),
            "socket" => BackendOptions::Place(socket(&mut pairs)?),
            "null" => BackendOptions::Null,
            "ringbuf" | "memory" => {
                let size = pairs.remove("size").map(|text| parse_size(&text)).transpose()?;
                BackendOptions::ring(size).map_err(Error::invalid_argument)?
            }
            other => {
                let message = format!("the backend must be 'socket', 'stdio', 'null' or 'ringbuf', not '{other}'");
                return refused(message);
            }
        };
        if let Some(unknown) = pairs.keys().next() {
            return refused(format!("Invalid parameter '{unknown}'"));
        }
        let options = ChardevOptions { backend, log };
        if self.0.insert(id.clone(), options.clone()).is_some() {
            return refused(format!("there are two character devices '{id}'"));
        }
        Ok((id, options))
    }
}

fn check_fixed(pairs: &mut BTreeMap<String, String>, is_socket: bool) -> Result<()> {
    if is_socket && !pairs.contains_key("server") {
        return Err(Error::invalid_argument("a monitor is a server: 'server=on' is needed"));
    }
    for (key, wanted) in FIXED {
        let Some(value) = pairs.remove(*key) else { continue };
        // Waiting for a client would mean not to start.
        if parse_on_off(&value) != Some(*wanted) {
            let word = if *wanted { "on" } else { "off" };
            return Err(Error::invalid_argument(format!("'{key}' must be '{word}', not '{value}'")));
        }
    }
    pairs.retain(|key, _| !IGNORED.contains(&key.as_str()));
    Ok(())
}

/// What the log is to be. As in QEMU the two flags alone do nothing.
fn log(pairs: &mut BTreeMap<String, String>) -> Result<Option<LogOptions>> {
    let mut flag = |key: &str| match pairs.remove(key) {
        None => Ok(false),
        Some(value) => parse_on_off(&value)
            .ok_or_else(|| Error::invalid_argument(format!("Parameter '{key}' expects 'on' or 'off'"))),
    };
    let (append, timestamps) = (flag("logappend")?, flag("logtimestamp")?);
    Ok(pairs.remove("logfile").map(|path| LogOptions { path: path.into(), append, timestamps }))
}

fn socket(pairs: &mut BTreeMap<String, String>) -> Result<MonitorAddress> {
    match (pairs.remove("path"), pairs.remove("port")) {
        (Some(path), None) => Ok(MonitorAddress::Unix(path.into())),
        (None, Some(port)) => {
            let number = port.parse();
            let port = number
                .map_err(|_| Error::invalid_argument(format!("'port' expects a number up to 65535, not '{port}'")))?;
            Ok(MonitorAddress::Tcp { host: pairs.remove("host").unwrap_or_default(), port })
        }
        _ => Err(Error::invalid_argument("one of 'path' and 'port' is needed")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backends_and_their_options_are_known() {
        let mut chardevs = Chardevs::default();
        let tcp = MonitorAddress::Tcp { host: "::1".into(), port: 4444 };
        for (text, backend) in [
            (
                "socket,id=a,path=/run/a.sock,server=on,wait=off",
                BackendOptions::Place(MonitorAddress::Unix("/run/a.sock".into())),
            ),
            ("backend=socket,id=b,host=::1,port=4444,server,nowait", BackendOptions::Place(tcp)),
            ("stdio,id=c,signal=off", BackendOptions::Place(MonitorAddress::Stdio)),
            ("null,id=e,logtimestamp=on", BackendOptions::Null),
            ("ringbuf,id=f,size=1k", BackendOptions::Ring { size: 1024 }),
            ("memory,id=g", BackendOptions::Ring { size: 65536 }),
        ] {
            let (id, options) = chardevs.add(text).unwrap();
            assert_eq!(options, ChardevOptions { backend, log: None }, "{text}");
            assert!(chardevs.contains(&id));
        }
        assert!(!chardevs.contains("d"));
        let (_, options) = chardevs.add("null,id=d,logfile=/l,logappend=on").unwrap();
        assert_eq!(options.log, Some(LogOptions { path: "/l".into(), append: true, timestamps: false }));
    }

    #[test]
    fn what_would_not_be_done_is_refused() {
        for (wrong, reason) in [
            ("socket,path=/a,server=on", "no id specified"),
            ("id=a", "chardev: \"a\" missing backend"),
            ("socket,id=a,path=/a", "'server=on' is needed"),
            ("socket,id=a,path=/a,server=on,wait=on", "'wait' must be 'off'"),
            ("socket,id=a,server=on", "one of 'path' and 'port'"),
            ("socket,id=a,port=99999,server=on", "'port' expects a number"),
            ("pty,id=a", "'pty'"),
            ("stdio,id=a,foo=1", "Invalid parameter 'foo'"),
            ("null,id=a,size=1k", "Invalid parameter 'size'"),
            ("ringbuf,id=a,size=1000", "power of two"),
            ("null,id=a,logfile=x,logappend=maybe", "Parameter 'logappend' expects 'on' or 'off'"),
        ] {
            let error = Chardevs::default().add(wrong).unwrap_err().to_string();
            assert!(error.contains(reason), "{wrong}: {error}");
        }
    }
}

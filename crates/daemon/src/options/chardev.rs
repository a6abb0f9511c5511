// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `--chardev`: where a monitor can be.

use crate::monitor::MonitorAddress;
use cowshed_block::{Error, Result};
use cowshed_image::options::{BareKey, parse_list, parse_on_off};
use std::collections::BTreeMap;

/// The character devices named so far.
#[derive(Clone, Debug, Default)]
pub struct Chardevs(BTreeMap<String, MonitorAddress>);

/// Options of a socket that say how a connection is made, with nothing to decide for us: they must say what we do.
const FIXED: &[(&str, bool)] =
    &[("server", true), ("wait", false), ("nowait", true), ("telnet", false), ("mux", false)];

/// Options without effect on a server.
const IGNORED: &[&str] = &["nodelay", "delay", "signal", "reconnect", "reconnect-ms", "ipv4", "ipv6"];

impl Chardevs {
    /// Takes `socket,id=ID,path=PATH,server=on,wait=off`, `socket,id=ID,host=HOST,port=PORT,server=on,wait=off` or
    /// `stdio,id=ID`. Returns the id and the place.
    pub fn add(&mut self, text: &str) -> Result<(String, MonitorAddress)> {
        self.parse(text).map_err(|error| error.file(format!("--chardev {text}")))
    }

    /// The device with this id.
    pub fn find(&self, id: &str) -> Option<&MonitorAddress> {
        self.0.get(id)
    }

    fn parse(&mut self, text: &str) -> Result<(String, MonitorAddress)> {
        let refused = |message: String| Err(Error::invalid_argument(message));
        let first = text.split(',').next().unwrap_or_default();
        let text = if first.contains('=') { text.to_owned() } else { format!("backend={text}") };
        let mut pairs: BTreeMap<String, String> = parse_list(&text, BareKey::On)?.into_iter().collect();
        let Some(id) = pairs.remove("id") else { return refused("'id' is missing".into()) };
        let backend = pairs.remove("backend").unwrap_or_default();
        check_fixed(&mut pairs, backend == "socket")?;
        let address = match backend.as_str() {
            "stdio" => MonitorAddress::Stdio,
            "socket" => socket(&mut pairs)?,
            other => return refused(format!("the backend must be 'socket' or 'stdio', not '{other}'")),
        };
        if let Some(unknown) = pairs.keys().next() {
            return refused(format!("unknown option '{unknown}'"));
        }
        if self.0.insert(id.clone(), address.clone()).is_some() {
            return refused(format!("there are two character devices '{id}'"));
        }
        Ok((id, address))
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
    fn sockets_and_standard_input_are_known() {
        let mut chardevs = Chardevs::default();
        chardevs.add("socket,id=a,path=/run/a.sock,server=on,wait=off").unwrap();
        chardevs.add("backend=socket,id=b,host=::1,port=4444,server,nowait").unwrap();
        chardevs.add("stdio,id=c,signal=off").unwrap();
        assert_eq!(chardevs.find("a"), Some(&MonitorAddress::Unix("/run/a.sock".into())));
        assert_eq!(chardevs.find("b"), Some(&MonitorAddress::Tcp { host: "::1".into(), port: 4444 }));
        assert_eq!(chardevs.find("c"), Some(&MonitorAddress::Stdio));
        assert_eq!(chardevs.find("d"), None);
    }

    #[test]
    fn what_would_not_be_done_is_refused() {
        for (wrong, reason) in [
            ("socket,path=/a,server=on", "'id' is missing"),
            ("socket,id=a,path=/a", "'server=on' is needed"),
            ("socket,id=a,path=/a,server=on,wait=on", "'wait' must be 'off'"),
            ("socket,id=a,server=on", "one of 'path' and 'port'"),
            ("socket,id=a,port=99999,server=on", "'port' expects a number"),
            ("pty,id=a", "'pty'"),
            ("stdio,id=a,foo=1", "unknown option 'foo'"),
        ] {
            let error = Chardevs::default().add(wrong).unwrap_err().to_string();
            assert!(error.contains(reason), "{wrong}: {error}");
        }
    }
}

// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `--chardev`: where a monitor can be.

use crate::chardevs::{BackendOptions, ChardevOptions, check_pauses};
use crate::monitor::{ClientAddress, LogOptions, MonitorAddress};
use cowshed_image::options::{BareKey, parse_list, parse_on_off, parse_size, size_refused};
use cowshed_types::{Error, Result, check_identifier};
use std::collections::BTreeMap;
use std::time::Duration;

/// The character devices named so far.
#[derive(Clone, Debug, Default)]
pub struct Chardevs(BTreeMap<String, ChardevOptions>);

/// Options of a connection with only one value here: they must have it.
const FIXED: &[(&str, bool)] = &[("telnet", false), ("mux", false)];

/// Options without effect.
const IGNORED: &[&str] = &["nodelay", "delay", "signal", "ipv4", "ipv6", "tight"];

/// The options of all backends in QEMU, with their types.
pub(super) const OPTIONS: &[(&str, &str)] = &[
    ("abstract", "bool (on/off)"),
    ("append", "bool (on/off)"),
    ("backend", "str"),
    ("chardev", "str"),
    ("chardevs.0", "str"),
    ("chardevs.1", "str"),
    ("chardevs.2", "str"),
    ("chardevs.3", "str"),
    ("clipboard", "bool (on/off)"),
    ("cols", "num"),
    ("debug", "num"),
    ("delay", "bool (on/off)"),
    ("encoding", "str"),
    ("fd", "str"),
    ("height", "num"),
    ("host", "str"),
    ("input-path", "str"),
    ("ipv4", "bool (on/off)"),
    ("ipv6", "bool (on/off)"),
    ("localaddr", "str"),
    ("localport", "str"),
    ("logappend", "bool (on/off)"),
    ("logfile", "str"),
    ("logtimestamp", "bool (on/off)"),
    ("mouse", "bool (on/off)"),
    ("mux", "bool (on/off)"),
    ("name", "str"),
    ("nodelay", "bool (on/off)"),
    ("path", "str"),
    ("port", "str"),
    ("reconnect-ms", "num"),
    ("rows", "num"),
    ("server", "bool (on/off)"),
    ("signal", "bool (on/off)"),
    ("size", "size"),
    ("telnet", "bool (on/off)"),
    ("tight", "bool (on/off)"),
    ("tls-authz", "str"),
    ("tls-creds", "str"),
    ("tn3270", "bool (on/off)"),
    ("to", "num"),
    ("wait", "bool (on/off)"),
    ("websocket", "bool (on/off)"),
    ("width", "num"),
];

/// Options that say how a socket is to be, and are refused where they ask for more than there is.
const OF_SOCKETS: &[&str] = &["abstract", "tn3270", "to", "websocket"];

/// Backends that QEMU's daemon has besides.
const OTHERS: &[&str] = &["file", "hub", "mux", "parallel", "pipe", "pty", "serial", "udp"];

impl Chardevs {
    /// Takes `socket,id=ID,path=PATH,server=on,wait=off`, `socket,id=ID,host=HOST,port=PORT,server=on,wait=off`, both
    /// without `server=on` for a client that listens there (`reconnect-ms=N`), `socket,id=ID,fd=N`,
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
        check_identifier(&id)?;
        let Some(backend) = pairs.remove("backend") else {
            return refused(format!("chardev: \"{id}\" missing backend"));
        };
        pairs.iter().try_for_each(|(key, value)| check_type(key, value))?;
        check_fixed(&mut pairs)?;
        let is_socket = backend == "socket";
        let log = log(&mut pairs)?;
        let backend = match backend.as_str() {
            "stdio" => BackendOptions::Place(MonitorAddress::Stdio),
            "socket" => socket(&mut pairs)?,
            "null" => BackendOptions::Null,
            "ringbuf" | "memory" => {
                // 0 is no size, as in QEMU.
                let size = pairs.remove("size").map(|text| parse_size(&text)).transpose()?.filter(|size| *size > 0);
                BackendOptions::ring(size).map_err(Error::invalid_argument)?
            }
            other => {
                let missing = match other {
                    "file" if !pairs.contains_key("path") => Some("chardev: file: no filename given"),
                    "pipe" if !pairs.contains_key("path") => Some("chardev: pipe: no device path given"),
                    _ => None,
                };
                if let Some(missing) = missing {
                    return refused(missing.to_owned());
                }
                let message = format!("the backend must be 'socket', 'stdio', 'null' or 'ringbuf', not '{other}'");
                let error = Error::invalid_argument(message);
                return Err(match OTHERS.contains(&other) {
                    true => error,
                    false => error.qemu(format!("'{other}' is not a valid char driver name")),
                });
            }
        };
        let asks = |(option, value): &(&String, &String)| {
            OF_SOCKETS.contains(&option.as_str()) && parse_on_off(value) != Some(false)
        };
        if is_socket {
            check_tls(&pairs)?;
            if let Some((option, _)) = pairs.iter().find(asks) {
                return refused(format!("Invalid parameter '{option}'"));
            }
        }
        let options = ChardevOptions { backend, log };
        if options.is_stdio() && self.0.values().any(ChardevOptions::is_stdio) {
            return refused("cannot use stdio by multiple character devices".to_owned());
        }
        if self.0.contains_key(&id) {
            return refused(format!("attempt to add duplicate property '{id}' to object (type 'container')"));
        }
        self.0.insert(id.clone(), options.clone());
        Ok((id, options))
    }
}

/// Refuses an option that no backend has, or a value of another type. Those of other backends do nothing, as in QEMU.
fn check_type(key: &str, value: &str) -> Result<()> {
    let Some((_, kind)) = OPTIONS.iter().find(|(name, _)| *name == key) else {
        return Err(Error::invalid_argument(format!("Invalid parameter '{key}'")));
    };
    match *kind {
        "num" if parse_number(value).is_none() => {
            Err(Error::invalid_argument(format!("Parameter '{key}' expects a number")))
        }
        "size" if parse_size(value).is_err() => Err(Error::invalid_argument(size_refused(key, value))),
        "bool (on/off)" if parse_on_off(value).is_none() => {
            Err(Error::invalid_argument(format!("Parameter '{key}' expects 'on' or 'off'")))
        }
        _ => Ok(()),
    }
}

/// A number as C reads it.
fn parse_number(text: &str) -> Option<u64> {
    let text = text.trim_start();
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

fn check_fixed(pairs: &mut BTreeMap<String, String>) -> Result<()> {
    for (key, wanted) in FIXED {
        let Some(value) = pairs.remove(*key) else { continue };
        if parse_on_off(&value) != Some(*wanted) {
            let word = if *wanted { "on" } else { "off" };
            return Err(Error::invalid_argument(format!("'{key}' must be '{word}', not '{value}'")));
        }
    }
    pairs.retain(|key, _| !IGNORED.contains(&key.as_str()));
    Ok(())
}

/// Refuses what asks for TLS, which character devices don't speak here.
fn check_tls(pairs: &BTreeMap<String, String>) -> Result<()> {
    match (pairs.get("tls-creds"), pairs.get("tls-authz")) {
        (Some(_), _) => Err(Error::unsupported("character devices have no TLS ('tls-creds')")),
        (None, Some(_)) => Err(Error::invalid_argument("'tls_authz' option requires 'tls_creds' option")),
        (None, None) => Ok(()),
    }
}

/// The options of the log. As in QEMU the two flags alone do nothing.
fn log(pairs: &mut BTreeMap<String, String>) -> Result<Option<LogOptions>> {
    let (append, timestamps) = (flag(pairs, "logappend")?, flag(pairs, "logtimestamp")?);
    let (append, timestamps) = (append.unwrap_or(false), timestamps.unwrap_or(false));
    Ok(pairs.remove("logfile").map(|path| LogOptions { path: path.into(), append, timestamps }))
}

/// A switch, where it is given.
fn flag(pairs: &mut BTreeMap<String, String>, key: &str) -> Result<Option<bool>> {
    let wrong = || Error::invalid_argument(format!("Parameter '{key}' expects 'on' or 'off'"));
    pairs.remove(key).map(|value| parse_on_off(&value).ok_or_else(wrong)).transpose()
}

/// A socket that listens, or that connects to a client.
fn socket(pairs: &mut BTreeMap<String, String>) -> Result<BackendOptions> {
    let refused = |message: String| Err(Error::invalid_argument(message));
    let is_server = flag(pairs, "server")?.unwrap_or(false);
    let waits = flag(pairs, "wait")?;
    let reconnect = pairs.remove("reconnect-ms");
    let (path, host, port, fd) = (pairs.remove("path"), pairs.remove("host"), pairs.remove("port"), pairs.remove("fd"));
    if [&path, &host, &fd].into_iter().flatten().count() > 1 {
        return refused("None or one of 'path', 'fd' or 'host' option required.".to_owned());
    }
    if host.is_some() && port.is_none() {
        return refused("chardev: socket: no port given".to_owned());
    }
    if is_server {
        if waits == Some(true) {
            // Waiting for a client would mean not to start.
            return refused("'wait' must be 'off', not 'on'".to_owned());
        }
        check_pauses(true, reconnect.is_some(), false).map_err(Error::invalid_argument)?;
        return Ok(BackendOptions::Place(match (path, port, fd) {
            (Some(path), ..) => MonitorAddress::Unix(path.into()),
            (None, Some(port), _) => MonitorAddress::Tcp {
                port: number(host.as_deref().unwrap_or_default(), &port)?,
                host: host.unwrap_or_default(),
            },
            (None, None, Some(fd)) => MonitorAddress::Passed(descriptor(&fd)?),
            (None, None, None) => return refused("one of 'path' and 'port' is needed".to_owned()),
        }));
    }
    check_pauses(false, false, waits.is_some()).map_err(Error::invalid_argument)?;
    let reconnect = match reconnect.map(|text| text.parse::<u64>()) {
        Some(Err(_)) => return refused("Parameter 'reconnect-ms' expects a number".to_owned()),
        Some(Ok(pause)) => Some(pause).filter(|&pause| pause > 0).map(Duration::from_millis),
        None => None,
    };
    let address = match (path, host, port, fd) {
        (Some(path), ..) => ClientAddress::Unix(path.into()),
        (None, Some(host), Some(port), _) => ClientAddress::Tcp { port: number(&host, &port)?, host },
        (.., fd) => ClientAddress::Passed(descriptor(&fd.unwrap_or_default())?),
    };
    Ok(BackendOptions::Outgoing { address, reconnect })
}

fn descriptor(text: &str) -> Result<i32> {
    text.parse().map_err(|_| Error::invalid_argument(format!("Unable to parse FD number {text}")))
}

fn number(host: &str, text: &str) -> Result<u16> {
    crate::socket::port(host, text, "'port'").map_err(Error::invalid_argument)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backends_and_their_options_are_known() {
        let mut chardevs = Chardevs::default();
        let tcp = MonitorAddress::Tcp { host: "::1".into(), port: 4444 };
        let outgoing = |address, pause: Option<u64>| BackendOptions::Outgoing {
            address,
            reconnect: pause.map(Duration::from_millis),
        };
        for (text, backend) in [
            (
                "socket,id=a,path=/run/a.sock,server=on,wait=off",
                BackendOptions::Place(MonitorAddress::Unix("/run/a.sock".into())),
            ),
            ("backend=socket,id=b,host=::1,port=4444,server,nowait", BackendOptions::Place(tcp)),
            ("socket,id=h,path=s", outgoing(ClientAddress::Unix("s".into()), None)),
            ("socket,id=i,path=s,server=off,reconnect-ms=100", outgoing(ClientAddress::Unix("s".into()), Some(100))),
            ("socket,id=j,host=h,port=7", outgoing(ClientAddress::Tcp { host: "h".into(), port: 7 }, None)),
            ("socket,id=k,fd=3,reconnect-ms=0", outgoing(ClientAddress::Passed(3), None)),
            ("socket,id=l,fd=3,server=on,wait=off", BackendOptions::Place(MonitorAddress::Passed(3))),
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
    fn ids_and_the_standard_streams_are_taken_once() {
        let mut chardevs = Chardevs::default();
        chardevs.add("stdio,id=a").expect("the first");
        for (wrong, reason) in [
            ("null,id=a", "attempt to add duplicate property 'a' to object (type 'container')"),
            ("stdio,id=b", "cannot use stdio by multiple character devices"),
        ] {
            let error = chardevs.add(wrong).expect_err(wrong);
            assert_eq!(error.message(), reason, "{wrong}");
        }
        assert!(!chardevs.contains("b"));
    }

    #[test]
    fn what_would_not_be_done_is_refused() {
        for (wrong, reason) in [
            ("socket,path=/a,server=on", "no id specified"),
            ("null,id=1x", "Parameter 'id' expects an identifier\nIdentifiers consist of letters"),
            ("null,id=", "Parameter 'id' expects an identifier"),
            ("id=a", "chardev: \"a\" missing backend"),
            ("socket,id=a,path=/a,wait=on", "'wait' option is incompatible with socket in client connect mode"),
            (
                "socket,id=a,path=/a,server=on,reconnect-ms=1",
                "'reconnect-ms' option is incompatible with socket in server",
            ),
            ("socket,id=a,path=/a,server=maybe", "Parameter 'server' expects 'on' or 'off'"),
            ("socket,id=a,path=/a,reconnect-ms=x", "Parameter 'reconnect-ms' expects a number"),
            ("socket,id=a,host=h", "chardev: socket: no port given"),
            ("socket,id=a,port=1", "Unable to parse FD number "),
            ("socket,id=a,fd=x", "Unable to parse FD number x"),
            ("socket,id=a,path=/a,server=on,wait=on", "'wait' must be 'off'"),
            ("socket,id=a,server=on", "one of 'path' and 'port'"),
            ("socket,id=a,port=99999,server=on", "'port' expects a number"),
            ("pty,id=a", "'pty'"),
            ("stdio,id=a,foo=1", "Invalid parameter 'foo'"),
            ("ringbuf,id=a,size=1000", "power of two"),
            ("ringbuf,id=a,size=16E", "Value '16E' is out of range for parameter 'size'"),
            ("null,id=a,logfile=x,logappend=maybe", "Parameter 'logappend' expects 'on' or 'off'"),
        ] {
            let error = Chardevs::default().add(wrong).unwrap_err().to_string();
            assert!(error.contains(reason), "{wrong}: {error}");
        }
    }
}

// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `nbd://`, `nbds://`, `nbd+unix://`, `nbds+unix://`, and QEMU's older `nbd:HOST:PORT` and `nbd:unix:PATH`.

use cowshed_types::{Error, Result};
use std::fmt;

/// The address of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ServerAddress {
    /// A host name or address, and a port.
    Tcp {
        /// Host name, IPv4 address, or IPv6 address without brackets.
        host: String,
        /// Port.
        port: u16,
    },
    /// The path of a Unix socket; an abstract one starts with NUL.
    Unix {
        /// The path.
        path: String,
    },
}

/// An export on a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NbdUri {
    /// The server.
    pub address: ServerAddress,
    /// The export's name, "" for the default one.
    pub export: String,
    /// Encryption is a must (`nbds`).
    pub tls: bool,
    /// `tls-hostname`: the name in the server's certificate.
    pub tls_hostname: Option<String>,
    /// `tls-certificates`: the folder of the credentials, as libnbd has it.
    pub tls_certificates: Option<String>,
    /// `tls-verify-peer`: whether the server's certificate is looked at.
    pub tls_verify_peer: Option<bool>,
}

impl NbdUri {
    /// True for names that [`NbdUri::parse`] is for.
    pub fn is_one(name: &str) -> bool {
        ["nbd:", "nbds:", "nbd+unix:", "nbds+unix:", "nbd+tcp:", "nbds+tcp:"]
            .iter()
            .any(|scheme| name.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme)))
    }

    /// From a file name.
    pub fn parse(name: &str) -> Result<NbdUri> {
        let wrong = |why: &str| {
            let error = Error::invalid_argument(format!("not a valid NBD address: {why}")).file(name);
            error.qemu(match why {
                NO_PATH => NO_PATH_SENTENCE,
                LONG_EXPORT => LONG_EXPORT_SENTENCE,
                _ => "No valid URL specified",
            })
        };
        let Some((scheme, rest)) = name.split_once(':') else { return Err(wrong("no scheme")) };
        let Some(rest) = rest.strip_prefix("//") else {
            return match scheme {
                "nbd" => parse_legacy(rest).map_err(|(why, sentence)| wrong(&why).qemu(sentence)),
                _ => {
                    Err(wrong("'//' is missing behind the scheme")
                        .qemu("File name string for NBD must start with 'nbd:'"))
                }
            };
        };
        let (tls, unix) = match scheme.to_ascii_lowercase().as_str() {
            "nbd" | "nbd+tcp" => (false, false),
            "nbds" | "nbds+tcp" => (true, false),
            "nbd+unix" => (false, true),
            "nbds+unix" => (true, true),
            _ => return Err(wrong("unknown scheme")),
        };
        parse_rest(rest, tls, unix).map_err(|why| wrong(&why))
    }
}

/// The error for a name of an export that doesn't fit into a message.
const LONG_EXPORT: &str = "the export's name is too long";
/// QEMU's sentence for it.
pub const LONG_EXPORT_SENTENCE: &str = "export name too long to send to server";
/// The error for an address with an empty path.
const NO_PATH: &str = "the path of the socket is missing";
/// QEMU finds that out when it connects.
const NO_PATH_SENTENCE: &str = "Failed to connect to '': Connection refused";

fn parse_rest(rest: &str, tls: bool, unix: bool) -> Result<NbdUri, String> {
    if rest.contains('#') {
        return Err("it has a fragment".into());
    }
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = match rest.find('/') {
        Some(at) => (&rest[..at], &rest[at + 1..]),
        None => (rest, ""),
    };
    let export = decode(path)?;
    check_export(&export)?;
    let (mut socket, mut tls_hostname, mut tls_certificates, mut tls_verify_peer) = (None, None, None, None);
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let value = decode(value)?;
        match key {
            "socket" => socket = Some(value),
            "tls-hostname" => tls_hostname = Some(value),
            "tls-certificates" => tls_certificates = Some(value),
            "tls-verify-peer" => {
                tls_verify_peer = Some(match value.as_str() {
                    "0" | "false" => false,
                    "1" | "true" => true,
                    _ => return Err("'tls-verify-peer' is neither 0 nor 1".into()),
                });
            }
            "tls-type" if value == "x509" => {}
            "tls-type" => return Err(format!("'tls-type' {value} is not supported, only x509 is")),
            other => return Err(format!("unknown parameter '{other}'")),
        }
    }
    let address = if unix {
        if !authority.is_empty() {
            return Err(format!("'{authority}' is a host, where the address is the path of a socket"));
        }
        match socket {
            Some(path) if !path.is_empty() => ServerAddress::Unix { path },
            Some(_) => return Err(NO_PATH.into()),
            None => return Err("the parameter 'socket' is missing".into()),
        }
    } else {
        if socket.is_some() {
            return Err("'socket' is for the schemes with '+unix'".into());
        }
        tcp(authority)?
    };
    Ok(NbdUri { address, export, tls, tls_hostname, tls_certificates, tls_verify_peer })
}

fn check_export(name: &str) -> Result<(), String> {
    match name.contains('\0') {
        _ if name.len() > crate::MAX_STRING_BYTES => Err(LONG_EXPORT.into()),
        true => Err("the export's name holds a NUL".into()),
        false => Ok(()),
    }
}

/// `[USER@]HOST[:PORT]`, where an IPv6 address has brackets.
fn tcp(authority: &str) -> Result<ServerAddress, String> {
    let (_, host_port) = authority.rsplit_once('@').unwrap_or(("", authority));
    let (host, port) = match host_port.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or("']' is missing behind the address")?;
            let port = match port {
                "" => "",
                port => port.strip_prefix(':').ok_or("only a port may follow ']'")?,
            };
            (host.to_owned(), port)
        }
        None => match host_port.rsplit_once(':') {
            Some((host, port)) => (decode(host)?, port),
            None => (decode(host_port)?, ""),
        },
    };
    let is_address = host_port.starts_with('[');
    let fits = |c: char| c.is_alphanumeric() || "-._".contains(c) || (is_address && ":%".contains(c));
    if !host.chars().all(fits) {
        return Err(format!("'{host}' is no host (an IPv6 address stands in brackets)"));
    }
    let host = if host.is_empty() { "localhost".to_owned() } else { host };
    let port = match port {
        "" => crate::DEFAULT_PORT,
        port => match port.parse().map_err(|_| format!("'{port}' is no port"))? {
            // As if it weren't there.
            0 => crate::DEFAULT_PORT,
            port => port,
        },
    };
    Ok(ServerAddress::Tcp { host, port })
}

/// `HOST:PORT[:exportname=NAME]` or `unix:PATH[:exportname=NAME]`. An error has QEMU's sentence besides.
fn parse_legacy(rest: &str) -> Result<NbdUri, (String, String)> {
    const MISSING: &str = "NBD server address missing";
    let (rest, export) = match rest.split_once(":exportname=") {
        Some((_, "")) => return Err(("the name of the export is missing".into(), MISSING.into())),
        Some(parts) => parts,
        None => (rest, ""),
    };
    check_export(export).map_err(|why| match why == LONG_EXPORT {
        true => (why, LONG_EXPORT_SENTENCE.to_owned()),
        false => (why.clone(), why),
    })?;
    let address = match rest.strip_prefix("unix:") {
        Some("") => return Err((NO_PATH.into(), NO_PATH_SENTENCE.into())),
        Some(path) => ServerAddress::Unix { path: path.to_owned() },
        None if rest.is_empty() => return Err(("there is nothing behind 'nbd:'".into(), MISSING.into())),
        None => legacy_tcp(rest)?,
    };
    Ok(NbdUri {
        address,
        export: export.to_owned(),
        tls: false,
        tls_hostname: None,
        tls_certificates: None,
        tls_verify_peer: None,
    })
}

/// `HOST:PORT`; neither may be left out.
fn legacy_tcp(address: &str) -> Result<ServerAddress, (String, String)> {
    let unparsed = || format!("error parsing address '{address}'");
    let (host, port) = match address.rsplit_once(':') {
        Some((host, port)) if !port.is_empty() && !port.ends_with(']') => (host, port),
        _ => return Err(("the port is missing".into(), unparsed())),
    };
    if host.is_empty() {
        let sentence = format!("address resolution failed for {address}: Name or service not known");
        return Err(("the host is missing".into(), sentence));
    }
    match port.parse::<u16>() {
        Err(_) => {
            let sentence = format!("address resolution failed for {address}: Servname not supported for ai_socktype");
            Err((format!("'{port}' is no port"), sentence))
        }
        Ok(0) => Err((format!("'{port}' is no port"), format!("Failed to connect to '{address}': Connection refused"))),
        Ok(_) => tcp(address).map_err(|why| (why, unparsed())),
    }
}

/// Turns `%XX` into the byte.
fn decode(text: &str) -> Result<String, String> {
    if !text.contains('%') {
        return Ok(text.to_owned());
    }
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digit = |at: usize| rest.get(at).and_then(|&byte| char::from(byte).to_digit(16));
        match (digit(0), digit(1)) {
            (Some(high), Some(low)) => bytes.push((high * 16 + low) as u8),
            _ => return Err("'%' is not followed by two hexadecimal digits".into()),
        }
        rest = &rest[2..];
    }
    String::from_utf8(bytes).map_err(|_| "it is not UTF-8".into())
}

/// Writes `text` with everything escaped that has a meaning in a URI. `keep`: characters that stay.
fn encode(text: &str, keep: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    for byte in text.bytes() {
        let plain = byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || keep.as_bytes().contains(&byte);
        match plain {
            true => write!(f, "{}", char::from(byte))?,
            false => write!(f, "%{byte:02X}")?,
        }
    }
    Ok(())
}

impl NbdUri {
    /// The name of the image as QEMU shows it: with the port, and without a slash where no export is named. It can be opened
    /// again whatever the export's name is. Encryption stays part of it, or a backing file would be opened without it one day.
    pub fn image_name(&self) -> String {
        let mut name = self.to_string();
        match &self.address {
            _ if self.tls => {}
            ServerAddress::Unix { .. } if self.export.is_empty() => name = name.replacen(":///?", "://?", 1),
            ServerAddress::Tcp { port, .. } if *port == crate::DEFAULT_PORT => {
                let host = "nbd://".len();
                let end = name[host..].find('/').map_or(name.len(), |len| host + len);
                name.insert_str(end, &format!(":{port}"));
            }
            ServerAddress::Unix { .. } | ServerAddress::Tcp { .. } => {}
        }
        name
    }
}

impl fmt::Display for NbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.tls { "nbds" } else { "nbd" })?;
        let mut parameters: Vec<(&str, &str)> = Vec::new();
        match &self.address {
            ServerAddress::Tcp { host, port } => {
                f.write_str("://")?;
                match host.contains(':') {
                    true => write!(f, "[{host}]")?,
                    false => encode(host, "", f)?,
                }
                if *port != crate::DEFAULT_PORT {
                    write!(f, ":{port}")?;
                }
            }
            ServerAddress::Unix { path } => {
                f.write_str("+unix://")?;
                parameters.push(("socket", path));
            }
        }
        if !self.export.is_empty() || !parameters.is_empty() {
            f.write_str("/")?;
            encode(&self.export, "/:@!$,", f)?;
        }
        if let Some(name) = &self.tls_hostname {
            parameters.push(("tls-hostname", name));
        }
        if let Some(folder) = &self.tls_certificates {
            parameters.push(("tls-certificates", folder));
        }
        if let Some(verify) = self.tls_verify_peer {
            parameters.push(("tls-verify-peer", if verify { "1" } else { "0" }));
        }
        for (index, (key, value)) in parameters.iter().enumerate() {
            write!(f, "{}{key}=", if index == 0 { '?' } else { '&' })?;
            encode(value, "/:", f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parts(name: &str) -> (String, String) {
        let uri = NbdUri::parse(name).unwrap();
        let place = match uri.address {
            ServerAddress::Tcp { host, port } => format!("{host} {port}"),
            ServerAddress::Unix { path } => path,
        };
        (place, uri.export)
    }

    #[test]
    fn images_are_named_as_qemu_names_them() {
        for (uri, name) in [
            ("nbd://h", "nbd://h:10809"),
            ("nbd://h/x%20y", "nbd://h:10809/x%20y"),
            ("nbd://[::1]:7/", "nbd://[::1]:7"),
            ("nbd+unix:///?socket=s", "nbd+unix://?socket=s"),
            ("nbd+unix:///x?socket=s", "nbd+unix:///x?socket=s"),
            ("nbds://h/?tls-hostname=n", "nbds://h?tls-hostname=n"),
        ] {
            assert_eq!(NbdUri::parse(uri).expect(uri).image_name(), name);
            NbdUri::parse(name).expect("it can be opened again");
        }
    }

    #[test]
    fn the_examples_of_the_standard() {
        for (name, place, export) in [
            ("nbd://example.com/disk", "example.com 10809", "disk"),
            ("nbd+unix:///disk?socket=sock", "sock", "disk"),
            ("nbd://example.com/", "example.com 10809", ""),
            ("nbd://example.com", "example.com 10809", ""),
            ("nbd://example.com//disk", "example.com 10809", "/disk"),
            ("nbd://example.com/hello%20world", "example.com 10809", "hello world"),
            ("nbd+unix:///?socket=%00/abstract", "\0/abstract", ""),
            ("nbd://[::1]:10810/a", "::1 10810", "a"),
            ("nbd://user@h:1/a", "h 1", "a"),
            ("nbd:localhost:10809", "localhost 10809", ""),
            ("nbd:localhost:10810:exportname=a:b", "localhost 10810", "a:b"),
            ("nbd:unix:/run/x.sock:exportname=top", "/run/x.sock", "top"),
            ("nbd:[::1]:99", "::1 99", ""),
        ] {
            assert_eq!(parts(name), (place.to_owned(), export.to_owned()), "{name}");
        }
        assert!(NbdUri::parse("nbds://h/").unwrap().tls);
        let uri = NbdUri::parse("nbds+unix:///?socket=s&tls-hostname=n&tls-verify-peer=0").unwrap();
        assert_eq!((uri.tls_hostname.as_deref(), uri.tls_verify_peer), (Some("n"), Some(false)));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (name, part) in [
            ("nbd+unix:///disk", "'socket'"),
            ("nbd://h/?colour=red", "'colour'"),
            ("nbd://h:99999/", "'99999'"),
            ("nbd://::1/", "brackets"),
            ("nbd://a%08b/", "is no host"),
            ("nbd+unix://h/?socket=s", "'h'"),
            ("nbd:h:0", "'0'"),
            ("nbd:h", "port"),
            ("nbd::1", "host"),
            ("nbd:", "nothing"),
            ("nbd:h:1:exportname=", "export"),
            ("nbd://[::1/", "']'"),
            ("nbd://h/%4", "'%'"),
            ("nbd://h/a%00b", "NUL"),
            ("nbd:h:1:exportname=a\0b", "NUL"),
            ("nbds:h:1", "'//'"),
            ("nbd://h/?tls-type=psk", "psk"),
            ("nbd:unix:", "path"),
        ] {
            let error = NbdUri::parse(name).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains(name), "{error}");
        }
        assert!(NbdUri::is_one("nbd:x") && NbdUri::is_one("NBD+unix:///") && !NbdUri::is_one("nbdx:"));
    }

    proptest! {
        #[test]
        fn uris_survive_printing(export in "\\PC{0,20}", path in "/\\PC{1,20}", port in 1u16.., unix: bool, tls: bool) {
            let address = match unix {
                true => ServerAddress::Unix { path },
                false => ServerAddress::Tcp { host: "fe80::1".into(), port },
            };
            let tls_certificates = tls.then(|| "/etc/a b".to_owned());
            let uri = NbdUri { address, export, tls, tls_hostname: None, tls_certificates, tls_verify_peer: None };
            prop_assert_eq!(NbdUri::parse(&uri.to_string()).unwrap(), uri);
        }

        #[test]
        fn no_text_makes_the_parser_fall(text in "nbds?(\\+unix)?:(//)?\\PC*") {
            let _ = NbdUri::parse(&text);
        }
    }
}

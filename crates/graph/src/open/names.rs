// SPDX-License-Identifier: Apache-2.0 OR MIT
//! File names: pseudo protocols, and names that are relative to the image that holds them.

use super::policy::{FileKind, Files};
use super::{Drivers, HostFiles};
use crate::options::{self, BlockdevOptions, DriverKind};
use cowshed_nbd_proto::NbdUri;
use cowshed_storage::path_of_text;
use cowshed_types::{Error, Result};
use serde_json::Value;

/// The protocol in front of a name ("nbd:…", "json:…"): the text before a colon that comes before any slash.
pub(super) fn protocol(name: &str) -> Option<&str> {
    let end = name.find([':', '/'])?;
    if name.as_bytes().get(end) == Some(&b':') { Some(&name[..end]) } else { None }
}

/// The options of the protocol node for a name.
pub(super) fn protocol_options(name: &str, files: &dyn Files) -> Result<BlockdevOptions> {
    if NbdUri::is_one(name) {
        return Ok(options::nbd_of_uri(&NbdUri::parse(name)?));
    }
    let path = match protocol(name) {
        None => name,
        Some("file") => {
            let path = &name["file:".len()..];
            // Under the name that is shown it can be opened again.
            return match protocol(path) {
                Some(_) => Ok(file_options(driver_for(path, files), &format!("./{path}"))),
                None if path.is_empty() => Err(no_file_name(name)),
                None => Ok(file_options(driver_for(path, files), path)),
            };
        }
        Some("blkdebug") => {
            let Some((config, file)) = name["blkdebug:".len()..].split_once(':') else {
                let message = "the name is 'blkdebug:CONFIG:FILE', with or without a file of rules as CONFIG";
                let error = Error::invalid_argument(message).file(name);
                return Err(error.qemu("blkdebug requires both config file and image path"));
            };
            let node = BlockdevOptions::new().with("driver", "blkdebug").with("image", protocol_options(file, files)?);
            return Ok(if config.is_empty() { node } else { node.with("config", config) });
        }
        Some("blkverify") => {
            let Some((raw, test)) = name["blkverify:".len()..].split_once(':') else {
                let error = Error::invalid_argument("the name is 'blkverify:RAW:TEST'").file(name);
                return Err(error.qemu("blkverify requires raw copy and original image path"));
            };
            let test = BlockdevOptions::new().with("file", protocol_options(test, files)?);
            let node = BlockdevOptions::new().with("driver", "blkverify").with("raw", protocol_options(raw, files)?);
            return Ok(node.with("test", test));
        }
        Some(driver @ ("host_device" | "host_cdrom")) => return Ok(file_options(driver, &name[driver.len() + 1..])),
        Some(driver @ ("null-co" | "null-aio")) => match name.strip_prefix(driver) {
            Some("://") => return Ok(BlockdevOptions::new().with("driver", driver)),
            _ => {
                let sentence = format!("The only allowed filename for this driver is '{driver}://'");
                let message = format!("the name of a {driver} disk is '{driver}://'");
                return Err(Error::invalid_argument(message).file(name).qemu(sentence));
            }
        },
        Some("fat") => return Ok(folder_options(&name["fat:".len()..])),
        Some(protocol) => return Err(unknown_protocol(protocol, name)),
    };
    if path.is_empty() {
        return Err(no_file_name(name));
    }
    Ok(file_options(driver_for(path, files), path))
}

/// True for a driver above others that reads names by itself.
pub(super) fn has_names(driver: &str, name: &str) -> bool {
    driver == "blkdebug" || (driver == "blkverify" && protocol(name) == Some(driver))
}

/// The options of a protocol node whose driver is given. The driver decides about the reading of the name.
pub(super) fn options_for(driver: &str, name: &str, files: &dyn Files) -> Result<BlockdevOptions> {
    let wrong = |message: &str| Err(Error::invalid_argument(message).file(name));
    let is_own = match driver {
        "file" | "host_device" | "host_cdrom" => {
            let path = name.strip_prefix(driver).and_then(|rest| rest.strip_prefix(':')).unwrap_or(name);
            return if path.is_empty() { Err(no_file_name(name)) } else { Ok(file_options(driver, path)) };
        }
        "nbd" if NbdUri::is_one(name) => true,
        "nbd" if name.contains("://") => return wrong("No valid URL specified"),
        "nbd" => return wrong("File name string for NBD must start with 'nbd:'"),
        "null-co" | "null-aio" if protocol(name) != Some(driver) => {
            return wrong(&format!("The only allowed filename for this driver is '{driver}://'"));
        }
        "vvfat" if protocol(name) != Some("fat") => return wrong("File name string must start with 'fat:'"),
        "vvfat" | "null-co" | "null-aio" => true,
        "blkdebug" if protocol(name) != Some(driver) => {
            return Ok(BlockdevOptions::new().with("driver", driver).with("image", protocol_options(name, files)?));
        }
        "blkdebug" | "blkverify" => true,
        _ => false,
    };
    let options = protocol_options(name, files)?;
    Ok(if is_own { options } else { options.with("driver", driver) })
}

/// The options of `fat:[12:|16:|32:][floppy:][rw:]FOLDER`, behind the protocol.
fn folder_options(name: &str) -> BlockdevOptions {
    let (mut folder, mut kind, mut is_floppy, mut writes) = (name, 0, false, false);
    while let Some((word, rest)) = folder.split_once(':') {
        match word {
            "12" => kind = 12,
            "16" => kind = 16,
            "32" => kind = 32,
            "floppy" => is_floppy = true,
            "rw" => writes = true,
            _ => break,
        }
        folder = rest;
    }
    let options = BlockdevOptions::new().with("fat-type", kind).with("dir", folder).with("driver", "vvfat");
    options.with("floppy", is_floppy).with("rw", writes)
}

const CURL: &str = "'nbdkit curl URL' serves what is there over NBD";

/// Drivers of QEMU whose files no driver here reaches, and the server for each.
pub const SERVED_BY_NBDKIT: [(&str, &str); 5] = [
    ("http", CURL),
    ("https", CURL),
    ("ftp", CURL),
    ("ftps", CURL),
    ("ssh", "'nbdkit ssh HOST:PATH' serves what is there over NBD"),
];

/// The server for files that no driver here reaches.
pub(super) fn instead_of(protocol: &str) -> Option<&'static str> {
    SERVED_BY_NBDKIT.iter().find(|(known, _)| *known == protocol).map(|(_, server)| *server)
}

fn no_file_name(name: &str) -> Error {
    let error = Error::invalid_argument("empty file name").file(name);
    error.qemu("The 'file' block driver requires a file name")
}

fn unknown_protocol(protocol: &str, name: &str) -> Error {
    if let Some(instead) = instead_of(protocol) {
        return Error::unsupported(format!("Unknown protocol '{protocol}': {instead}")).file(name);
    }
    let error = Error::invalid_argument(format!("Unknown protocol '{protocol}'")).file(name);
    error.hint(format!(" (a file of this name is './{name}')"))
}

/// Refuses a name that no driver would open again as a file: one with a colon before any slash.
pub fn check_file_name(name: &str) -> Result<()> {
    match protocol(name) {
        _ if NbdUri::is_one(name) => Ok(()),
        None | Some("file" | "host_device" | "host_cdrom" | "json") => Ok(()),
        Some(protocol @ ("blkdebug" | "blkverify" | "null-co" | "null-aio" | "fat")) => {
            let driver = if protocol == "fat" { "vvfat" } else { protocol };
            let message = format!("Protocol driver '{driver}' does not support image creation");
            Err(Error::invalid_argument(message).file(name).hint(format!(" (a file of this name is './{name}')")))
        }
        Some(protocol) => Err(unknown_protocol(protocol, name)),
    }
}

/// The protocol driver for a path whose options name none.
pub(super) fn driver_for(path: &str, files: &dyn Files) -> &'static str {
    match files.kind(&path_of_text(path)) {
        Some(FileKind::BlockDevice) => "host_device",
        _ => "file",
    }
}

pub(super) fn file_options(driver: &str, path: &str) -> BlockdevOptions {
    BlockdevOptions::new().with("driver", driver).with("filename", path)
}

/// See [`Drivers::options_with_name`].
pub(super) fn options_with_name(
    drivers: &Drivers,
    mut options: BlockdevOptions,
    name: &str,
) -> Result<BlockdevOptions> {
    let of_name = match BlockdevOptions::from_json_name(name) {
        Some(of_name) => of_name.map_err(|error| error.file(name))?,
        None => {
            let driver = options.text("driver").and_then(|driver| drivers.schema(driver));
            let child = match driver {
                Some(driver) if driver.name == "blkdebug" && name.starts_with("blkdebug:") => None,
                Some(driver) if driver.name == "blkdebug" => Some("image"),
                Some(driver) if driver.kind == DriverKind::Protocol => None,
                _ => Some("file"),
            };
            let Some(child) = child else {
                return with_protocol_name(options, name);
            };
            let nested = match options.remove(child) {
                None => with_protocol_name(BlockdevOptions::new(), name)?,
                Some(Value::Object(map)) => {
                    let nested = BlockdevOptions::from_map(map)?;
                    match nested.get("driver") {
                        Some(_) => options_with_name(drivers, nested, name)?,
                        None => with_protocol_name(nested, name)?,
                    }
                }
                // A node by its name takes no file name.
                Some(other) => return Ok(options.with(child, other)),
            };
            return Ok(options.with(child, nested));
        }
    };
    of_name.overlaid(options)
}

/// The options of a protocol node with those that its name means.
fn with_protocol_name(options: BlockdevOptions, name: &str) -> Result<BlockdevOptions> {
    let of_name = match options.text("driver") {
        // The driver decides about the reading of the name.
        Some(driver @ ("file" | "host_device" | "host_cdrom")) => {
            let prefix = format!("{driver}:");
            BlockdevOptions::new().with("filename", name.strip_prefix(&prefix).unwrap_or(name))
        }
        _ => protocol_options(name, &HostFiles)?,
    };
    of_name.overlaid(options)
}

/// The name that an image in file `image` means by `name`. Absolute names and names with a protocol (also `file:`, as
/// in QEMU) stay as they are; others are relative to the image's folder. `image` is the path of the image file, `None`
/// where it has none: a relative name means nothing then.
pub fn resolve(name: &str, image: Option<&str>) -> Result<String> {
    if protocol(name).is_some() || name.starts_with('/') {
        return Ok(name.to_owned());
    }
    let Some(image) = image else {
        let message = format!("can't resolve the relative name '{name}': the image that holds it has no file name");
        return Err(Error::invalid_argument(message));
    };
    match image.rfind('/') {
        Some(end) => Ok(format!("{}{name}", &image[..=end])),
        None => Ok(name.to_owned()),
    }
}

/// Refuses a folder, or a file for a driver of devices.
pub(super) fn check_file_kind(driver: &str, path: &str, kind: Option<FileKind>, writes: bool) -> Result<()> {
    let wanted = match (driver, kind) {
        // The system refuses these when they are opened.
        ("file", Some(FileKind::Socket)) => return Ok(()),
        ("file", Some(FileKind::Folder)) if writes => return Ok(()),
        ("file", Some(FileKind::Folder | FileKind::CharacterDevice)) => "a regular file",
        ("file", Some(FileKind::Other | FileKind::BlockDevice)) => "a regular file",
        ("host_device" | "host_cdrom", Some(kind)) if !kind.is_device() => "a block device",
        _ => return Ok(()),
    };
    let error = Error::invalid_argument(format!("driver '{driver}' needs {wanted}"));
    let named = if driver == "file" { wanted } else { "either a character or block device" };
    Err(error.qemu(format!("'{driver}' driver requires '{path}' to be {named}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::open::{FILTERS, HostFiles, PROTOCOLS};

    /// The drivers that have no format.
    static OWN: Drivers = Drivers::new(&[PROTOCOLS, FILTERS], &[]);

    #[test]
    fn files_are_made_only_under_names_that_open_them() {
        for name in ["a", "./a:b", "dir/a:b", "file:a:b", "/a:b", "nbd+unix:///?socket=s", "nbd:unix:s", "nbd://h/x"] {
            check_file_name(name).unwrap();
        }
        for name in ["null-co://", "blkdebug::a", "blkverify:a:b", "fat:a"] {
            let error = check_file_name(name).unwrap_err();
            assert!(error.sentence().ends_with("' does not support image creation"), "{error}");
            assert!(error.to_string().contains(&format!("'./{name}'")), "{error}");
        }
        for name in ["a:b", "2026-01-01T10:00.qcow2", "x:"] {
            let error = check_file_name(name).unwrap_err();
            assert!(error.sentence().starts_with("Unknown protocol '"), "{error}");
            assert!(error.to_string().contains(&format!("'./{name}'")), "{error}");
        }
    }

    #[test]
    fn names_belong_to_the_lowest_file() {
        for (options, name, expected) in [
            ("", "a", r#"{"file":{"driver":"file","filename":"a"}}"#),
            (
                "driver=qcow2",
                "blkdebug::a",
                r#"{"driver":"qcow2","file":{"driver":"blkdebug","image":{"driver":"file","filename":"a"}}}"#,
            ),
            (
                "driver=copy-on-read,file.driver=qcow2",
                "a",
                r#"{"driver":"copy-on-read","file":{"driver":"qcow2","file":{"driver":"file","filename":"a"}}}"#,
            ),
            (
                "driver=blkdebug,image.driver=qcow2",
                "a",
                r#"{"driver":"blkdebug","image":{"driver":"qcow2","file":{"driver":"file","filename":"a"}}}"#,
            ),
            (
                "driver=raw,file.align=4k",
                "blkdebug::a",
                r#"{"driver":"raw","file":{"driver":"blkdebug","image":{"driver":"file","filename":"a"},"align":"4k"}}"#,
            ),
            ("driver=file", "file:a", r#"{"filename":"a","driver":"file"}"#),
            ("file.driver=file", "a:b", r#"{"file":{"filename":"a:b","driver":"file"}}"#),
            (
                "driver=qcow2",
                r#"json:{"driver":"raw","file.filename":"a"}"#,
                r#"{"driver":"qcow2","file":{"filename":"a"}}"#,
            ),
            ("driver=qcow2,file=node", "a", r#"{"driver":"qcow2","file":"node"}"#),
        ] {
            let given = match options {
                "" => BlockdevOptions::new(),
                text => BlockdevOptions::from_keyval(text).unwrap(),
            };
            let expected = BlockdevOptions::from_json(expected).unwrap();
            assert_eq!(options_with_name(&OWN, given, name).unwrap(), expected, "{options} {name}");
        }
    }

    #[test]
    fn relative_names_start_at_the_image() {
        for (name, image, expected) in [
            ("base.raw", "dir/top.qcow2", "dir/base.raw"),
            ("base.raw", "top.qcow2", "base.raw"),
            ("../b", "/a/c/top", "/a/c/../b"),
            ("/abs", "dir/top", "/abs"),
            ("file:b", "dir/top", "file:b"),
            ("json:{}", "dir/top", "json:{}"),
            ("a/b:c", "dir/top", "dir/a/b:c"),
        ] {
            assert_eq!(resolve(name, Some(image)).unwrap(), expected);
        }
        assert!(resolve("base", None).is_err());
        assert_eq!(resolve("/base", None).unwrap(), "/base");
    }

    #[test]
    fn protocols_are_named_or_refused() {
        let driver = |name: &str| protocol_options(name, &HostFiles).map(|o| o.text("driver").unwrap().to_owned());
        assert_eq!(driver("a.qcow2").unwrap(), "file");
        assert_eq!(driver("./a:b").unwrap(), "file");
        assert_eq!(driver("null-co://").unwrap(), "null-co");
        assert_eq!(driver("null-aio://").unwrap(), "null-aio");
        assert!(driver("null-aio://x").is_err());
        for name in ["nbd://h/x", "nbd:unix:/x", "nbd+unix:///?socket=/x", "NBD://h"] {
            assert_eq!(driver(name).unwrap(), "nbd");
        }
        let file = protocol_options("file:a:b", &HostFiles).unwrap();
        assert_eq!(file.text("filename"), Some("./a:b"));
        for (name, part) in [("nbd+unix:///x", "'socket'"), ("http://x/y", "'http'"), ("", "empty"), ("file:", "empty")]
        {
            let error = driver(name).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}

// SPDX-License-Identifier: Apache-2.0 OR MIT
//! File names: pseudo protocols, and names that are relative to the image that holds them.

use super::file_names::WithoutWord;
use super::policy::{FileKind, Files};
use super::{Drivers, HostFiles};
use crate::options::BlockdevOptions;
use cowshed_storage::path_of_text;
use cowshed_types::{Error, Result};
use serde_json::Value;

/// The protocol in front of a name ("nbd:…", "json:…"): the text before a colon that comes before any slash.
pub(super) fn protocol(name: &str) -> Option<&str> {
    let end = name.find([':', '/'])?;
    if name.as_bytes().get(end) == Some(&b':') { Some(&name[..end]) } else { None }
}

/// The options of the protocol node for a name.
pub(super) fn protocol_options(drivers: &Drivers, name: &str, files: &dyn Files) -> Result<BlockdevOptions> {
    if let Some((line, names)) = drivers.reading(name) {
        return names.read((drivers, line.schema.name), name, files);
    }
    match protocol(name) {
        Some(protocol) => Err(unknown_protocol(protocol, name)),
        None if name.is_empty() => Err(no_file_name(name)),
        None => Ok(file_options(driver_for(name, files), name)),
    }
}

/// True for a driver above others that reads names by itself.
pub(super) fn has_names(drivers: &Drivers, driver: &str, name: &str) -> bool {
    drivers
        .names_of(driver)
        .is_some_and(|names| matches!(names.without_word, WithoutWord::Child(_)) || names.claims(name))
}

/// The options of a protocol node whose driver is given. The driver decides about the reading of the name.
pub(super) fn options_for(drivers: &Drivers, driver: &str, name: &str, files: &dyn Files) -> Result<BlockdevOptions> {
    let options = || protocol_options(drivers, name, files);
    let Some(names) = drivers.names_of(driver) else { return Ok(options()?.with("driver", driver)) };
    match names.without_word {
        WithoutWord::Path => match names.strip(name) {
            "" => Err(no_file_name(name)),
            path => Ok(file_options(driver, path)),
        },
        _ if names.claims(name) => options(),
        WithoutWord::Refused(words) => Err(Error::invalid_argument(words(name)).file(name)),
        WithoutWord::Child(key) => Ok(BlockdevOptions::new().with("driver", driver).with(key, options()?)),
        WithoutWord::Other => Ok(options()?.with("driver", driver)),
    }
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

pub(super) fn no_file_name(name: &str) -> Error {
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

/// See [`Drivers::check_file_name`].
pub(super) fn check_file_name(drivers: &Drivers, name: &str) -> Result<()> {
    match (drivers.reading(name), protocol(name)) {
        (Some((_, names)), _) if names.makes_files => Ok(()),
        (Some((line, _)), _) => {
            let message = format!("Protocol driver '{}' does not support image creation", line.schema.name);
            Err(Error::invalid_argument(message).file(name).hint(format!(" (a file of this name is './{name}')")))
        }
        (None, None | Some("json")) => Ok(()),
        (None, Some(protocol)) => Err(unknown_protocol(protocol, name)),
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
            let driver = options.text("driver").unwrap_or_default();
            let child = match drivers.names_of(driver).map(|names| (names.without_word, names.claims(name))) {
                Some((WithoutWord::Child(_), true)) => None,
                Some((WithoutWord::Child(key), false)) => Some(key),
                _ if drivers.is_protocol(driver) => None,
                _ => Some("file"),
            };
            let Some(child) = child else {
                return with_protocol_name(drivers, options, name);
            };
            let nested = match options.remove(child) {
                None => with_protocol_name(drivers, BlockdevOptions::new(), name)?,
                Some(Value::Object(map)) => {
                    let nested = BlockdevOptions::from_map(map)?;
                    match nested.get("driver") {
                        Some(_) => options_with_name(drivers, nested, name)?,
                        None => with_protocol_name(drivers, nested, name)?,
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
fn with_protocol_name(drivers: &Drivers, options: BlockdevOptions, name: &str) -> Result<BlockdevOptions> {
    let of_name = match options.text("driver").and_then(|driver| drivers.names_of(driver)) {
        // The driver decides about the reading of the name.
        Some(names) if matches!(names.without_word, WithoutWord::Path) => {
            BlockdevOptions::new().with("filename", names.strip(name))
        }
        _ => protocol_options(drivers, name, &HostFiles)?,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::open::{FILTERS, HostFiles, PROTOCOLS};

    /// The drivers that have no format.
    static OWN: Drivers = Drivers::new(&[PROTOCOLS, FILTERS], &[]);

    #[test]
    fn files_are_made_only_under_names_that_open_them() {
        for name in ["a", "./a:b", "dir/a:b", "file:a:b", "/a:b", "nbd+unix:///?socket=s", "nbd:unix:s", "nbd://h/x"] {
            check_file_name(&OWN, name).unwrap();
        }
        for name in ["null-co://", "blkdebug::a", "blkverify:a:b"] {
            let error = check_file_name(&OWN, name).unwrap_err();
            assert!(error.sentence().ends_with("' does not support image creation"), "{error}");
            assert!(error.to_string().contains(&format!("'./{name}'")), "{error}");
        }
        for name in ["a:b", "2026-01-01T10:00.qcow2", "x:"] {
            let error = check_file_name(&OWN, name).unwrap_err();
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
        let driver =
            |name: &str| protocol_options(&OWN, name, &HostFiles).map(|o| o.text("driver").unwrap().to_owned());
        assert_eq!(driver("a.qcow2").unwrap(), "file");
        assert_eq!(driver("./a:b").unwrap(), "file");
        assert_eq!(driver("null-co://").unwrap(), "null-co");
        assert_eq!(driver("null-aio://").unwrap(), "null-aio");
        assert!(driver("null-aio://x").is_err());
        for name in ["nbd://h/x", "nbd:unix:/x", "nbd+unix:///?socket=/x", "NBD://h"] {
            assert_eq!(driver(name).unwrap(), "nbd");
        }
        let file = protocol_options(&OWN, "file:a:b", &HostFiles).unwrap();
        assert_eq!(file.text("filename"), Some("./a:b"));
        for (name, part) in [("nbd+unix:///x", "'socket'"), ("http://x/y", "'http'"), ("", "empty"), ("file:", "empty")]
        {
            let error = driver(name).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}

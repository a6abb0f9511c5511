// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `--drive`: the grammar of QEMU's `-drive`, as far as it is about the image and not about a guest's device.

use crate::state::Daemon;
use cowshed_block::{Error, Result};
use cowshed_image::OpenRequest;
use cowshed_image::open::{Cache, options_of_name};
use cowshed_image::options::{BareKey, BlockdevOptions, parse_list, parse_on_off};
use serde_json::json;
use std::rc::Rc;

/// An image with how to open it.
#[derive(Clone, Debug)]
pub struct Drive {
    /// The node's name, and the export's.
    pub id: String,
    /// Clients may write.
    pub writable: bool,
    options: BlockdevOptions,
    cache: Cache,
}

/// Keys that are about a guest's device: they decide nothing here.
const OF_A_DEVICE: &[&str] = &["if", "index", "media", "bus", "unit", "serial", "werror", "rerror", "snapshot"];

impl Drive {
    /// The image `name`, as `id`.
    pub fn file(id: &str, name: &str, format: Option<&str>, writable: bool) -> Result<Drive> {
        let options = options_of_name(name, format)?;
        Ok(Drive::new(id, options, writable))
    }

    /// An image by its options (`--image-opts`), as `id`.
    pub fn image_opts(id: &str, text: &str, writable: bool) -> Result<Drive> {
        let options = BlockdevOptions::from_keyval(text).map_err(|error| error.file(text))?;
        Ok(Drive::new(id, options, writable))
    }

    fn new(id: &str, options: BlockdevOptions, writable: bool) -> Drive {
        let options = options.with("node-name", id).with("read-only", !writable);
        Drive { id: id.to_owned(), writable, options, cache: Cache::default() }
    }

    /// `file=NAME,format=FORMAT,id=ID,readonly=on,cache=MODE,…` and options of the format. `id` is the name where none is
    /// given, `writable` counts where nothing is said.
    pub fn parse(text: &str, id: &str, writable: bool) -> Result<Drive> {
        let option = || format!("--drive {text}");
        let wrong = |message: String| Error::invalid_argument(message).file(option());
        let (mut name, mut format, mut id) = (None, None, id.to_owned());
        let mut writable = writable;
        let mut settings: Vec<(String, String)> = Vec::new();
        let mut rest = Vec::new();
        for (key, value) in parse_list(text, BareKey::On).map_err(|error| error.file(option()))? {
            match key.as_str() {
                "file" => name = Some(value),
                "format" | "driver" => format = Some(value),
                "id" | "node-name" => id = value,
                "readonly" | "read-only" => {
                    let flag = parse_on_off(&value);
                    writable = !flag.ok_or_else(|| wrong(format!("'{key}' expects 'on' or 'off', not '{value}'")))?;
                }
                "cache" | "aio" | "discard" | "detect-zeroes" => settings.push((key, value)),
                key if OF_A_DEVICE.contains(&key) => {
                    return Err(wrong(format!("'{key}' is for a guest's device and means nothing here")));
                }
                _ => rest.push((key, value)),
            }
        }
        let mut options = match name {
            Some(name) => options_of_name(&name, format.as_deref())?,
            None if rest.iter().any(|(key, _)| key.starts_with("file.")) => {
                format.map_or_else(BlockdevOptions::new, |format| BlockdevOptions::new().with("driver", format))
            }
            None => return Err(wrong("'file' is missing".to_owned())),
        };
        // The rest as dotted keys beside what the name says.
        for (key, value) in rest {
            options.insert(key, value);
        }
        let tree = match serde_json::Value::from(options) {
            serde_json::Value::Object(map) => BlockdevOptions::from_map(map).map_err(|error| error.file(option()))?,
            _ => return Err(Error::internal("options are no object")),
        };
        let mut drive = Drive::new(&id, tree, writable);
        for (key, value) in settings {
            drive.set(&key, &value).map_err(|error| error.file(option()))?;
        }
        Ok(drive)
    }

    /// Sets `cache`, `aio`, `discard` or `detect-zeroes`, by the words of the command line.
    pub fn set(&mut self, key: &str, value: &str) -> Result<()> {
        match key {
            "cache" => {
                self.cache = Cache::parse(value)?;
                let cache = json!({"direct": self.cache.direct, "no-flush": self.cache.no_flush});
                self.options.insert("cache", cache);
            }
            "aio" => {
                let file = self.options.remove("file");
                match file {
                    Some(serde_json::Value::Object(mut map)) => {
                        map.insert("aio".to_owned(), value.into());
                        self.options.insert("file", map);
                    }
                    _ => return Err(Error::invalid_argument("'aio' needs a file")),
                }
            }
            _ => self.options.insert(key, value),
        }
        Ok(())
    }

    pub(crate) async fn add(self, daemon: &Rc<Daemon>) -> Result<()> {
        let request = OpenRequest::options(self.options).cache_mode(self.cache);
        let node = daemon.graph.add_with(request).await?;
        for warning in node.warnings() {
            tracing::warn!(node = node.name(), "{warning}");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn a_drive_is_a_name_and_options() {
        let drive = Drive::parse(
            "file=a,,b.qcow2,format=qcow2,readonly=on,l2-cache-size=4M,cache=none,aio=threads",
            "d0",
            true,
        )
        .unwrap();
        assert_eq!((drive.id.as_str(), drive.writable), ("d0", false));
        let expected = json!({
            "file": {"driver": "file", "filename": "a,b.qcow2", "aio": "threads"}, "driver": "qcow2",
            "l2-cache-size": "4M", "node-name": "d0", "read-only": true, "cache": {"direct": true, "no-flush": false},
        });
        assert_eq!(Value::from(drive.options), expected);
        let drive = Drive::parse("driver=raw,file.filename=x,file.locking=off,id=me", "d0", true).unwrap();
        assert_eq!((drive.id.as_str(), drive.writable), ("me", true));
    }

    #[test]
    fn what_means_nothing_is_refused_by_name() {
        for (wrong, reason) in [
            ("format=qcow2", "'file' is missing"),
            ("file=a,if=virtio", "'if'"),
            ("file=a,readonly=maybe", "'readonly' expects 'on' or 'off'"),
            ("file=a,cache=fast", "invalid cache mode 'fast'"),
            ("file=zzz:a", "zzz"),
        ] {
            let error = Drive::parse(wrong, "d", true).unwrap_err().to_string();
            assert!(error.contains(reason), "{wrong}: {error}");
        }
    }
}

// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `--object help`, `--object TYPE,help`, `--chardev help` and `--chardev BACKEND,help`, in QEMU's form.

use super::chardev::OPTIONS;
use crate::commands::NO_TYPE;
use cowshed_image::options::{BareKey, parse_list};
use cowshed_qmp::Type;
use cowshed_types::Result;

/// The backends of `--chardev`.
const CHARDEVS: &[&str] = &["memory", "null", "ringbuf", "socket", "stdio"];

fn is_help(word: &str) -> bool {
    matches!(word, "help" | "?")
}

/// True where a word of its own asks for help. The value of a key, as in `driver=help`, doesn't.
pub(super) fn is_asked(text: &str) -> bool {
    let is_json = text.trim_start().starts_with('{');
    !is_json && parse_list(text, BareKey::On).is_ok_and(|pairs| pairs.iter().any(|(key, _)| is_help(key)))
}

/// The first word of options that ask for help; `None` when they don't.
fn asked(text: &str) -> Option<String> {
    let pairs = if text.trim_start().starts_with('{') { Vec::new() } else { parse_list(text, BareKey::On).ok()? };
    let asks = pairs.iter().enumerate().any(|(index, (key, value))| is_help(key) || (index == 0 && is_help(value)));
    let (key, value) = pairs.first()?;
    // `TYPE` and `type=TYPE`.
    asks.then(
        || if text.split(',').next().is_some_and(|first| first.contains('=')) { value.clone() } else { key.clone() },
    )
}

fn listed(title: &str, lines: impl Iterator<Item = String>) -> String {
    let mut lines: Vec<String> = lines.map(|line| format!("\n  {line}")).collect();
    lines.sort_unstable();
    format!("{title}{}", lines.concat())
}

/// The text that `--object` prints when its value asks for help: the types, or the options of one. `None` when it
/// doesn't.
pub fn object_help(text: &str) -> Result<Option<String>> {
    let Some(kind) = asked(text).filter(|_| is_asked(text)) else { return Ok(None) };
    let schema = crate::schema::build()?;
    let Some(options) = schema.object("ObjectOptions") else { return Ok(None) };
    let known = || options.variants.iter().filter(|(name, _)| name != NO_TYPE);
    let variant = known().find(|(name, _)| *name == kind);
    let Some(object) = variant.and_then(|(_, object)| schema.object(object)) else {
        let kinds = known().map(|(name, _)| name.clone());
        return Ok(Some(listed("List of user creatable objects:", kinds)));
    };
    let type_of = |of: &Type| match of {
        Type::Str => "string".to_owned(),
        other => other.name(),
    };
    let lines = object.members.iter().map(|member| format!("{}=<{}>", member.name, type_of(&member.value)));
    Ok(Some(listed(&format!("{kind} options:"), lines)))
}

/// As [`object_help`], of `--chardev`: the backends, or the options of all of them. That one is a failure, as in QEMU.
pub fn chardev_help(text: &str) -> Option<(String, u8)> {
    let backend = asked(text)?;
    Some(match backend.as_str() {
        "help" | "?" => {
            (listed("Available chardev backend types: ", CHARDEVS.iter().map(|name| (*name).to_owned())), 0)
        }
        _ => (listed("chardev options:", OPTIONS.iter().map(|(name, value)| format!("{name}=<{value}>"))), 1),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_is_asked_for_by_a_word_of_its_own() {
        for text in [
            "qom-type=help",
            "secret,id=help",
            "secret,id=s,data=help",
            "{\"qom-type\": \"secret\"}",
            "",
            "helper,id=a",
        ] {
            assert_eq!(object_help(text).unwrap(), None, "{text}");
        }
        let all = object_help("help").unwrap().unwrap();
        assert!(
            all.starts_with("List of user creatable objects:\n  authz-list\n")
                && all.contains("\n  iothread\n")
                && all.contains("\n  secret\n"),
            "{all}"
        );
        assert!(!all.contains("colo-compare"), "{all}");
        for text in ["?", "nosuch,help", "colo-compare,help"] {
            assert_eq!(object_help(text).unwrap().as_ref(), Some(&all), "{text}");
        }
        let secret = "secret options:\n  data=<string>\n  file=<string>\n  format=<QCryptoSecretFormat>\n  iv=<string>\n  \
                      keyid=<string>\n  loaded=<bool>";
        for text in ["secret,help", "qom-type=secret,help", "secret,id=a,help", "secret,?"] {
            assert_eq!(object_help(text).unwrap().as_deref(), Some(secret), "{text}");
        }
        assert!(object_help("throttle-group,help").unwrap().unwrap().contains("\n  limits=<ThrottleLimits>\n"));
    }

    #[test]
    fn character_devices_have_one_list_of_options() {
        let all = "Available chardev backend types: \n  memory\n  null\n  ringbuf\n  socket\n  stdio";
        for text in ["help", "?", "help,id=a", "backend=help"] {
            assert_eq!(chardev_help(text), Some((all.to_owned(), 0)), "{text}");
        }
        for text in ["socket,help", "pty,help", "null,id=a,help", "id=a,help"] {
            let (options, code) = chardev_help(text).unwrap();
            assert!(options.contains("\n  path=<str>\n") && options.contains("\n  width=<num>"), "{options}");
            assert_eq!(code, 1, "{text}");
        }
        assert_eq!(chardev_help("socket,id=help,path=a,server=on"), None);
    }
}

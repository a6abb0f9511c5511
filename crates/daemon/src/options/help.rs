// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `--object help`, `--object TYPE,help`, `--chardev help` and `--chardev BACKEND,help`, in QEMU's form.

use cowshed_image::options::{BareKey, parse_list};
use cowshed_qmp::Type;
use cowshed_types::Result;

/// The backends of `--chardev` with their options.
const CHARDEVS: &[(&str, &[(&str, &str)])] = &[
    ("null", &[ID, LOG[0], LOG[1], LOG[2]]),
    ("ringbuf", &[ID, LOG[0], LOG[1], LOG[2], ("size", "size")]),
    (
        "socket",
        &[
            ("fd", "str"),
            ("host", "str"),
            ID,
            LOG[0],
            LOG[1],
            LOG[2],
            ("path", "str"),
            ("port", "num"),
            ("reconnect-ms", "num"),
            ("server", "bool (on/off)"),
            ("wait", "bool (on/off)"),
        ],
    ),
    ("stdio", &[ID, LOG[0], LOG[1], LOG[2], ("signal", "bool (on/off)")]),
];

const ID: (&str, &str) = ("id", "str");
const LOG: [(&str, &str); 3] = [("logappend", "bool (on/off)"), ("logfile", "str"), ("logtimestamp", "bool (on/off)")];

/// The first word of options that ask for help; `None` when they don't.
fn asked(text: &str) -> Option<String> {
    let is_help = |word: &str| matches!(word, "help" | "?");
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
    let Some(kind) = asked(text) else { return Ok(None) };
    let schema = crate::schema::build()?;
    let Some(options) = schema.object("ObjectOptions") else { return Ok(None) };
    let variant = options.variants.iter().find(|(name, _)| *name == kind);
    let Some(object) = variant.and_then(|(_, object)| schema.object(object)) else {
        let kinds = options.variants.iter().map(|(name, _)| name.clone());
        return Ok(Some(listed("List of user creatable objects:", kinds)));
    };
    let type_of = |of: &Type| match of {
        Type::Str => "string".to_owned(),
        other => other.name(),
    };
    let lines = object.members.iter().map(|member| format!("{}=<{}>", member.name, type_of(&member.value)));
    Ok(Some(listed(&format!("{kind} options:"), lines)))
}

/// As [`object_help`], of `--chardev`: the backends, or the options of one.
pub fn chardev_help(text: &str) -> Option<String> {
    let backend = asked(text)?;
    Some(match CHARDEVS.iter().find(|(name, _)| *name == backend) {
        Some((_, options)) => {
            listed("chardev options:", options.iter().map(|(name, value)| format!("{name}=<{value}>")))
        }
        None => listed("Available chardev backend types: ", CHARDEVS.iter().map(|(name, _)| (*name).to_owned())),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_is_asked_for_by_a_word_of_its_own() {
        for text in ["secret,id=help", "secret,id=s,data=help", "{\"qom-type\": \"secret\"}", "", "helper,id=a"] {
            assert_eq!(object_help(text).unwrap(), None, "{text}");
        }
        let all = object_help("help").unwrap().unwrap();
        assert!(
            all.starts_with("List of user creatable objects:\n  authz-list\n")
                && all.contains("\n  iothread\n")
                && all.contains("\n  secret\n"),
            "{all}"
        );
        for text in ["?", "nosuch,help", "qom-type=help"] {
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
    fn each_backend_of_character_devices_has_its_options() {
        let all = "Available chardev backend types: \n  null\n  ringbuf\n  socket\n  stdio";
        assert_eq!(chardev_help("help").as_deref(), Some(all));
        assert_eq!(chardev_help("pty,help").as_deref(), Some(all));
        assert!(chardev_help("socket,help").unwrap().contains("\n  path=<str>\n"));
        assert_eq!(chardev_help("socket,id=help,path=a,server=on"), None);
    }
}

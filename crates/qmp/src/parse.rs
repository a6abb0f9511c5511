// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The notation of a schema has one definition a line. A line that starts with a blank goes on with the one before it;
//! `#` starts a comment:
//!
//! ```text
//! enum Mode: safe hard
//! object Address: type: Kind | type = unix: UnixAddress, inet: InetAddress
//! alternate Reference: str, Options, null
//! command block_resize: device?: str, node-name?: str, size: int
//! command blockdev-add(Options)
//! command query-jobs -> [JobInfo]
//! event JOB_STATUS_CHANGE: id: str, status: JobStatus
//! ```

use crate::types::{Alternative, ObjectType, SchemaMember, Type};

/// A definition of the notation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Definition {
    Object(ObjectType),
    Other(Alternative),
    /// Its arguments and its result, which is absent if `None`.
    Command(ArgumentsType, Option<Type>),
    Event(ObjectType),
}

/// The arguments of a command.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ArgumentsType {
    /// Members of its own.
    Inline(ObjectType),
    /// An object type by name.
    Named(String),
}

/// Every definition with its name. The error names the wrong line.
pub(crate) fn parse(text: &str) -> Result<Vec<(String, Definition)>, String> {
    let mut lines: Vec<String> = Vec::new();
    for line in text.lines() {
        let line = line.split('#').next().unwrap_or_default();
        match (line.starts_with(' '), lines.last_mut()) {
            _ if line.trim().is_empty() => {}
            (true, Some(last)) => last.push_str(line),
            _ => lines.push(line.to_owned()),
        }
    }
    lines.iter().map(|line| definition(line).ok_or_else(|| format!("can't read the definition '{line}'"))).collect()
}

fn definition(line: &str) -> Option<(String, Definition)> {
    let (kind, rest) = line.trim().split_once(' ')?;
    let end = rest.find([':', '(', ' ']).unwrap_or(rest.len());
    let (name, rest) = (rest[..end].trim(), rest[end..].trim());
    let definition = match kind {
        "enum" => Definition::Other(Alternative::Enum(body(rest)?.split_whitespace().map(str::to_owned).collect())),
        "alternate" => {
            Definition::Other(Alternative::Alternate(body(rest)?.split(',').map(value).collect::<Option<_>>()?))
        }
        "object" => Definition::Object(object(body(rest)?)?),
        "event" => Definition::Event(object(body(rest)?)?),
        "command" => {
            let (arguments, returns) = match rest.split_once("->") {
                Some((arguments, returns)) => (arguments.trim(), Some(value(returns)?)),
                None => (rest, None),
            };
            let arguments = match arguments.strip_prefix('(') {
                Some(named) => ArgumentsType::Named(named.strip_suffix(')')?.trim().to_owned()),
                None => ArgumentsType::Inline(object(body(arguments)?)?),
            };
            Definition::Command(arguments, returns)
        }
        _ => return None,
    };
    (!name.is_empty()).then(|| (name.to_owned(), definition))
}

/// The text behind the colon; nothing at all is an empty body.
fn body(rest: &str) -> Option<&str> {
    if rest.is_empty() { Some("") } else { rest.strip_prefix(':').map(str::trim) }
}

fn object(text: &str) -> Option<ObjectType> {
    let (members, variants) = match text.split_once('|') {
        Some((members, variants)) => (members, Some(variants)),
        None => (text, None),
    };
    let mut object = ObjectType::default();
    for member in members.split(',').map(str::trim).filter(|member| !member.is_empty()) {
        let (name, of) = member.split_once(':')?;
        let (name, optional) = match name.trim().strip_suffix('?') {
            Some(name) => (name, true),
            None => (name.trim(), false),
        };
        object.members.push(SchemaMember { name: name.to_owned(), value: value(of)?, optional });
    }
    if let Some(variants) = variants {
        let (tag, cases) = variants.split_once('=')?;
        object.tag = Some(tag.trim().to_owned());
        for case in cases.split(',') {
            let (case, of) = case.split_once(':')?;
            object.variants.push((case.trim().to_owned(), of.trim().to_owned()));
        }
    }
    Some(object)
}

fn value(text: &str) -> Option<Type> {
    let text = text.trim();
    if let Some(element) = text.strip_prefix('[') {
        return Some(Type::List(Box::new(value(element.strip_suffix(']')?)?)));
    }
    Some(match text {
        "str" => Type::Str,
        "int" => Type::Int,
        "uint32" => Type::Uint32,
        "uint64" => Type::Uint64,
        "size" => Type::Size,
        "number" => Type::Number,
        "bool" => Type::Bool,
        "null" => Type::Null,
        "any" => Type::Any,
        name if !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c)) => {
            Type::Named(name.to_owned())
        }
        _ => return None,
    })
}

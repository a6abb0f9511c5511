// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The schema: arguments and results of commands. Arguments are checked against it before a command runs, so that a
//! wrong one changes nothing, and clients learn it with `query-qmp-schema`.

use crate::error::{QmpError, QmpResult};
use crate::order::ordered;
use crate::parse::{self, ArgumentsType, Definition};
use crate::size::size_of_text;
use crate::types::{Alternative, ObjectType, SchemaMember, Type};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Most words of an enumeration that an error lists: a longer list is no help.
const MOST_WORDS: usize = 16;

/// The allowed distance of a value from its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strictness {
    /// JSON: a number is a number.
    Exact,
    /// From a command line: scalars are texts, and become values of the type.
    Texts,
}

/// A command's types.
#[derive(Clone, Debug)]
struct CommandTypes {
    /// Name of an object type.
    arguments: String,
    returns: Option<Type>,
}

/// Types, commands and events by name.
#[derive(Clone, Debug, Default)]
pub struct Schema {
    objects: BTreeMap<String, ObjectType>,
    others: BTreeMap<String, Alternative>,
    commands: BTreeMap<String, CommandTypes>,
    /// Name → name of the object type of its data.
    events: BTreeMap<String, String>,
    /// Name of an enumeration and a value that it doesn't have → why not.
    refusals: BTreeMap<(String, String), String>,
    /// The same → the whole error.
    messages: BTreeMap<(String, String), String>,
}

/// Name of the object type of inline arguments or data.
fn inline_name(of: &str) -> String {
    format!("{of}-arg")
}

impl Schema {
    /// A schema without definitions.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the definitions in `text`; the source of this crate's module `parse` has the notation. The error names the
    /// part that can't be read, or is there twice.
    pub fn add(&mut self, text: &str) -> Result<(), String> {
        for (name, definition) in parse::parse(text)? {
            let twice = match definition {
                Definition::Object(object) => self.objects.insert(name.clone(), object).is_some(),
                Definition::Other(other) => self.others.insert(name.clone(), other).is_some(),
                Definition::Event(data) => {
                    self.objects.insert(inline_name(&name), data);
                    self.events.insert(name.clone(), inline_name(&name)).is_some()
                }
                Definition::Command(arguments, returns) => {
                    let arguments = match arguments {
                        ArgumentsType::Named(name) => name,
                        ArgumentsType::Inline(object) => {
                            self.objects.insert(inline_name(&name), object);
                            inline_name(&name)
                        }
                    };
                    self.commands.insert(name.clone(), CommandTypes { arguments, returns }).is_some()
                }
            };
            if twice {
                return Err(format!("'{name}' is defined twice"));
            }
        }
        Ok(())
    }

    /// Adds or replaces an object type: for types that come out of another table.
    pub fn define_object(&mut self, name: impl Into<String>, object: ObjectType) {
        self.objects.insert(name.into(), object);
    }

    /// Adds or replaces an enumeration or alternate.
    pub fn define_other(&mut self, name: impl Into<String>, other: Alternative) {
        self.others.insert(name.into(), other);
    }

    /// The object type of this name.
    pub fn object(&self, name: &str) -> Option<&ObjectType> {
        self.objects.get(name)
    }

    /// The names of the commands.
    pub fn commands(&self) -> impl Iterator<Item = &str> {
        self.commands.keys().map(String::as_str)
    }

    /// The names of the events.
    pub fn events(&self) -> impl Iterator<Item = &str> {
        self.events.keys().map(String::as_str)
    }

    /// True when there is this command.
    pub fn has_command(&self, name: &str) -> bool {
        self.commands.contains_key(name)
    }

    /// Gives the error a reason for a value that the enumeration `name` lacks and other programs have.
    pub fn refuse(&mut self, name: &str, value: &str, reason: impl Into<String>) {
        self.refusals.insert((name.to_owned(), value.to_owned()), reason.into());
    }

    /// The whole error for a value that the enumeration `name` lacks.
    pub fn refuse_as(&mut self, name: &str, value: &str, message: impl Into<String>) {
        self.messages.insert((name.to_owned(), value.to_owned()), message.into());
    }

    /// Names that are used and not defined: must be empty.
    pub fn dangling(&self) -> Vec<String> {
        let mut used = BTreeSet::new();
        for object in self.objects.values() {
            object.members.iter().for_each(|member| collect_names(&member.value, &mut used));
            used.extend(object.variants.iter().map(|(_, of)| of.clone()));
        }
        for other in self.others.values() {
            if let Alternative::Alternate(types) = other {
                types.iter().for_each(|of| collect_names(of, &mut used));
            }
        }
        for command in self.commands.values() {
            used.insert(command.arguments.clone());
            command.returns.iter().for_each(|of| collect_names(of, &mut used));
        }
        used.retain(|name| !self.objects.contains_key(name) && !self.others.contains_key(name));
        used.into_iter().collect()
    }

    /// Checks the arguments of a command; returns them with the types of the schema.
    pub fn check_arguments(&self, command: &str, arguments: Map<String, Value>) -> QmpResult<Map<String, Value>> {
        let Some(types) = self.commands.get(command) else {
            return Err(QmpError::generic(format!("there is no command '{command}'")));
        };
        self.check_object(&types.arguments, arguments, "", Strictness::Exact)
    }

    /// Checks an object against the object type `name`.
    pub fn check(
        &self,
        name: &str,
        object: Map<String, Value>,
        strictness: Strictness,
    ) -> QmpResult<Map<String, Value>> {
        self.check_object(name, object, "", strictness)
    }

    fn check_object(
        &self,
        name: &str,
        mut object: Map<String, Value>,
        path: &str,
        strictness: Strictness,
    ) -> QmpResult<Map<String, Value>> {
        let Some(known) = self.objects.get(name) else {
            return Err(QmpError::generic(format!("the type '{name}' is not defined")));
        };
        let mut checked = Map::new();
        self.take_members(&known.members, &mut object, &mut checked, path, strictness)?;
        let case = known.tag.as_ref().and_then(|tag| checked.get(tag)).and_then(Value::as_str);
        let variant = case.and_then(|case| known.variants.iter().find(|(name, _)| name == case));
        if let Some((_, variant)) = variant {
            let rest = self.check_object(variant, object, path, strictness)?;
            checked.extend(rest);
            return Ok(checked);
        }
        match ordered(&object).first() {
            Some((key, _)) => Err(QmpError::generic(format!("Parameter '{}' is unexpected", join(path, key)))),
            None => Ok(checked),
        }
    }

    /// Moves the members from `object` to `checked`.
    fn take_members(
        &self,
        members: &[SchemaMember],
        object: &mut Map<String, Value>,
        checked: &mut Map<String, Value>,
        path: &str,
        strictness: Strictness,
    ) -> QmpResult<()> {
        for member in members {
            let path = join(path, &member.name);
            match object.remove(&member.name) {
                Some(value) => {
                    let value = self.check_value(&member.value, value, &path, strictness)?;
                    checked.insert(member.name.clone(), value);
                }
                None if member.optional => {}
                None => return Err(QmpError::generic(format!("Parameter '{path}' is missing"))),
            }
        }
        Ok(())
    }

    fn check_value(&self, of: &Type, value: Value, path: &str, strictness: Strictness) -> QmpResult<Value> {
        let texts = strictness == Strictness::Texts;
        match (of, value) {
            (Type::Any, value) | (Type::Str, value @ Value::String(_)) | (Type::Bool, value @ Value::Bool(_)) => {
                Ok(value)
            }
            (Type::Null, Value::Null) => Ok(Value::Null),
            (Type::Int, Value::Number(number)) if number.is_i64() => Ok(Value::Number(number)),
            (Type::Uint64 | Type::Size, Value::Number(number)) if number.is_u64() => Ok(Value::Number(number)),
            // As QEMU takes it: the number of 64 bits that is stored in the same way.
            (Type::Uint64 | Type::Size, Value::Number(number)) if number.is_i64() => {
                Ok(number.as_i64().map(i64::cast_unsigned).into())
            }
            (Type::Uint32, value) => {
                let value = self.check_value(&Type::Uint64, value, path, strictness)?;
                match value.as_u64().is_some_and(|number| u32::try_from(number).is_ok()) {
                    true => Ok(value),
                    false => Err(QmpError::generic(format!("Parameter '{}' expects uint32_t", own_name(path)))),
                }
            }
            (Type::Number, value @ Value::Number(_)) => Ok(value),
            (Type::Bool, Value::String(text)) if texts => flag(&text).map(Value::Bool).ok_or_else(|| {
                with_more(format!("Parameter '{path}' expects 'on' or 'off'"), format_args!(", not '{text}'"))
            }),
            (Type::Int | Type::Uint64, Value::String(text)) if texts => number_of(&text, of).ok_or_else(|| {
                with_more(format!("Parameter '{path}' expects integer"), format_args!(", not '{text}'"))
            }),
            (Type::Size, Value::String(text)) if texts => size_of_text(&text)
                .map(Value::from)
                .ok_or_else(|| with_more(format!("Parameter '{path}' expects size"), format_args!(", not '{text}'"))),
            (Type::List(element), Value::Array(items)) => {
                let items = items.into_iter().enumerate();
                let check = |(index, item)| {
                    // QEMU writes the path as it was given.
                    let path = if texts { format!("{path}.{index}") } else { format!("{path}[{index}]") };
                    self.check_value(element, item, &path, strictness)
                };
                items.map(check).collect::<QmpResult<Vec<Value>>>().map(Value::Array)
            }
            (Type::Named(name), value) => self.check_named(name, value, path, strictness),
            (of, _) => Err(self.wrong_type(of, path)),
        }
    }

    fn check_named(&self, name: &str, value: Value, path: &str, strictness: Strictness) -> QmpResult<Value> {
        match self.others.get(name) {
            Some(Alternative::Enum(words)) => match value {
                Value::String(word) if words.contains(&word) => Ok(Value::String(word)),
                Value::String(word) => {
                    let message = format!("Parameter '{}' does not accept value '{word}'", own_name(path));
                    let refused = (name.to_owned(), word);
                    if let Some(message) = self.messages.get(&refused) {
                        return Err(QmpError::generic(message.clone()));
                    }
                    if let Some(reason) = self.refusals.get(&refused) {
                        return Err(QmpError::generic(format!("{message}: {reason}")));
                    }
                    // A program has the schema.
                    let is_helpful = strictness == Strictness::Texts && words.len() <= MOST_WORDS;
                    Err(match is_helpful {
                        true => with_more(message, format_args!(": one of {}", words.join(", "))),
                        false => QmpError::generic(message),
                    })
                }
                _ => Err(QmpError::generic(format!("Invalid parameter type for '{path}', expected: string"))),
            },
            Some(Alternative::Alternate(types)) => {
                match types.iter().find(|of| self.json_type(of) == Some(kind_of(&value))) {
                    Some(of) => self.check_value(of, value, path, strictness),
                    None => Err(self.wrong_type(&Type::Named(name.to_owned()), own_name(path))),
                }
            }
            None => match value {
                Value::Object(object) => self.check_object(name, object, path, strictness).map(Value::Object),
                _ => Err(self.wrong_type(&Type::Named(name.to_owned()), path)),
            },
        }
    }

    fn wrong_type(&self, of: &Type, path: &str) -> QmpError {
        if matches!(of, Type::Uint64 | Type::Size) {
            return QmpError::generic(format!("Parameter '{path}' expects uint64"));
        }
        let expected = match (of, self.json_type(of)) {
            (Type::Int, _) => "integer",
            (_, Some(json_type)) => json_type,
            (Type::Named(name), None) => name,
            _ => "value",
        };
        QmpError::generic(format!("Invalid parameter type for '{path}', expected: {expected}"))
    }

    /// The JSON type that values of a type have, where it is one.
    fn json_type(&self, of: &Type) -> Option<&'static str> {
        Some(match of {
            Type::Str => "string",
            Type::Int | Type::Uint32 | Type::Uint64 | Type::Size | Type::Number => "number",
            Type::Bool => "boolean",
            Type::Null => "null",
            Type::List(_) => "array",
            Type::Any => return None,
            Type::Named(name) => match self.others.get(name) {
                Some(Alternative::Enum(_)) => "string",
                Some(Alternative::Alternate(_)) => return None,
                None => "object",
            },
        })
    }

    /// The result of `query-commands`.
    pub fn query_commands(&self) -> Value {
        self.commands.keys().map(|name| json!({"name": name})).collect()
    }

    /// The result of `query-qmp-schema`.
    pub fn query_schema(&self) -> Value {
        let mut entries: Vec<Value> = Vec::new();
        for (name, command) in &self.commands {
            let returns = command.returns.as_ref().map_or("empty".to_owned(), Type::name);
            entries.push(
                json!({"name": name, "meta-type": "command", "arg-type": command.arguments, "ret-type": returns}),
            );
        }
        for (name, data) in &self.events {
            entries.push(json!({"name": name, "meta-type": "event", "arg-type": data}));
        }
        entries.push(json!({"name": "empty", "meta-type": "object", "members": []}));
        for (name, object) in &self.objects {
            entries.push(describe_object(name, object));
        }
        for (name, other) in &self.others {
            entries.push(match other {
                Alternative::Enum(words) => {
                    let members: Vec<Value> = words.iter().map(|word| json!({"name": word})).collect();
                    json!({"name": name, "meta-type": "enum", "members": members, "values": words})
                }
                Alternative::Alternate(types) => {
                    let members: Vec<Value> = types.iter().map(|of| json!({"type": of.name()})).collect();
                    json!({"name": name, "meta-type": "alternate", "members": members})
                }
            });
        }
        for (name, json_type) in BUILTINS {
            entries.push(json!({"name": name, "meta-type": "builtin", "json-type": json_type}));
        }
        entries.extend(
            self.lists()
                .iter()
                .map(|(name, element)| json!({"name": name, "meta-type": "array", "element-type": element})),
        );
        Value::Array(entries)
    }

    /// Name → element of every list type that is used.
    fn lists(&self) -> BTreeMap<String, String> {
        let mut lists = BTreeMap::new();
        let members = self.objects.values().flat_map(|object| object.members.iter().map(|member| &member.value));
        let returns = self.commands.values().filter_map(|command| command.returns.as_ref());
        let alternates = self.others.values().flat_map(|other| match other {
            Alternative::Alternate(types) => types.as_slice(),
            Alternative::Enum(_) => &[],
        });
        for mut of in members.chain(returns).chain(alternates) {
            while let Type::List(element) = of {
                lists.insert(of.name(), element.name());
                of = element;
            }
        }
        lists
    }
}

/// Built-in types and their types in JSON.
const BUILTINS: &[(&str, &str)] =
    &[("str", "string"), ("int", "int"), ("number", "number"), ("bool", "boolean"), ("null", "null"), ("any", "value")];

fn describe_object(name: &str, object: &ObjectType) -> Value {
    let members: Vec<Value> = object
        .members
        .iter()
        .map(|member| {
            let mut described = json!({"name": member.name, "type": member.value.name()});
            if member.optional {
                described["default"] = Value::Null;
            }
            described
        })
        .collect();
    let mut described = json!({"name": name, "meta-type": "object", "members": members});
    if let Some(tag) = &object.tag {
        described["tag"] = json!(tag);
        let case = |(case, of): &(String, String)| json!({"case": case, "type": of});
        described["variants"] = object.variants.iter().map(case).collect();
    }
    described
}

fn collect_names(of: &Type, names: &mut BTreeSet<String>) {
    match of {
        Type::Named(name) => drop(names.insert(name.clone())),
        Type::List(element) => collect_names(element, names),
        _ => {}
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// The name by which QEMU calls a value in an enumeration or an alternate: without the path, and `null` in a list.
fn own_name(path: &str) -> &str {
    let name = path.rsplit('.').next().unwrap_or(path);
    let is_index = name.bytes().all(|byte| byte.is_ascii_digit());
    if is_index || name.ends_with(']') { "null" } else { name }
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

fn flag(text: &str) -> Option<bool> {
    match text {
        "on" | "yes" | "true" | "y" => Some(true),
        "off" | "no" | "false" | "n" => Some(false),
        _ => None,
    }
}

/// An error in QEMU's words, with the further words of our own command lines.
fn with_more(message: String, more: fmt::Arguments<'_>) -> QmpError {
    let whole = format!("{message}{more}");
    QmpError::generic(message).with_whole(whole)
}

/// A whole number as C reads it: blanks in front, a sign, hexadecimal behind `0x` and octal behind `0`.
fn number_of(text: &str, of: &Type) -> Option<Value> {
    let text = text.trim_start_matches([' ', '\t', '\n', '\x0b', '\x0c', '\r']);
    let (is_negative, text) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let behind = |small: &str, large: &str| text.strip_prefix(small).or_else(|| text.strip_prefix(large));
    let (digits, radix) = match (behind("0x", "0X"), behind("0b", "0B")) {
        (Some(digits), _) => (digits, 16),
        // As the C library has it since C23.
        (None, Some(digits)) => (digits, 2),
        (None, None) if text.len() > 1 && text.starts_with('0') => (text, 8),
        (None, None) => (text, 10),
    };
    if !digits.starts_with(|digit: char| digit.is_digit(radix)) {
        return None;
    }
    let size = u64::from_str_radix(digits, radix).ok()?;
    match (of, is_negative) {
        (Type::Uint64, true) => Some(size.wrapping_neg().into()),
        (Type::Uint64, false) => Some(size.into()),
        (_, true) => 0_i64.checked_sub_unsigned(size).map(Value::from),
        (_, false) => i64::try_from(size).ok().map(Value::from),
    }
}

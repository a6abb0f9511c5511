// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The types that arguments, results and events are made of.

/// A type, by reference where it has a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Type {
    /// `str`
    Str,
    /// `int`: a number that fits into 64 bits, with or without sign.
    Int,
    /// `uint32`: an `int` of 32 bits without sign.
    Uint32,
    /// `uint64`: an `int` without sign.
    Uint64,
    /// `size`: a `uint64` that texts may write with a suffix ([`crate::size_of_text`]).
    Size,
    /// `number`
    Number,
    /// `bool`
    Bool,
    /// `null`
    Null,
    /// `any`: whatever the command makes of it.
    Any,
    /// `[T]`
    List(Box<Type>),
    /// An object, enumeration or alternate by its name.
    Named(String),
}

/// A member of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchemaMember {
    /// Its key.
    pub name: String,
    /// The type of its value.
    pub value: Type,
    /// May be left out.
    pub optional: bool,
}

/// Members, and more of them by the value of one (the tag).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectType {
    /// The members that are always there.
    pub members: Vec<SchemaMember>,
    /// The member that decides about more.
    pub tag: Option<String>,
    /// Value of the tag → name of the object type with the further members. A value without a line adds none.
    pub variants: Vec<(String, String)>,
}

/// A named type that isn't an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Alternative {
    /// One of these words.
    Enum(Vec<String>),
    /// Any of these types, distinguished by their JSON type.
    Alternate(Vec<Type>),
}

impl Type {
    /// The name of the type in `query-qmp-schema`.
    pub fn name(&self) -> String {
        match self {
            Type::Str => "str".into(),
            Type::Int | Type::Uint32 | Type::Uint64 | Type::Size => "int".into(),
            Type::Number => "number".into(),
            Type::Bool => "bool".into(),
            Type::Null => "null".into(),
            Type::Any => "any".into(),
            Type::List(element) => format!("[{}]", element.name()),
            Type::Named(name) => name.clone(),
        }
    }
}

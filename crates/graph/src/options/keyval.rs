// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `key=value,key=value`, where `,,` stands for one comma in a value.

use cowshed_types::keyval::next_item;
use cowshed_types::{Error, LINE_END, Result};

/// The meaning of a key without `=`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BareKey {
    /// `key=on`, and `nokey` is `key=off` (`-o`, `--image-opts`).
    On,
    /// An error (`--blockdev`).
    Refused,
}

/// Splits a list into its pairs, in order, repeated keys included. An empty text is an empty list.
pub fn parse_list(text: &str, bare: BareKey) -> Result<Vec<(String, String)>> {
    let mut pairs = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let (item, behind) = next_item(rest);
        rest = behind;
        match item.split_once('=') {
            Some((key, value)) if !key.is_empty() => pairs.push((key.to_owned(), value.to_owned())),
            Some(_) => {
                let error = Error::invalid_argument(format!("no key before '=' in '{text}'"));
                return Err(error.qemu("Invalid parameter ''"));
            }
            None if bare == BareKey::On && !item.is_empty() => {
                let (key, value) = switch(&item);
                pairs.push((key.to_owned(), value.to_owned()));
            }
            None => {
                let error = Error::invalid_argument(format!("expected '=' after parameter '{item}' in '{text}'"));
                return Err(error.qemu(format!("Expected '=' after parameter '{item}'")));
            }
        }
    }
    Ok(pairs)
}

/// The key and the value of a word without `=`, as QEMU reads it: every key that begins with `no` is switched off.
pub fn switch(word: &str) -> (&str, &'static str) {
    match word.strip_prefix("no") {
        // A switch of sockets that is called so.
        Some("delay") | None => (word, "on"),
        Some(key) => (key, "off"),
    }
}

/// QEMU's warnings of the words without `=` in a list. The first word may have an implied key.
pub fn short_forms(text: &str, is_first_implied: bool) -> Vec<String> {
    let (mut warnings, mut rest, mut is_implied) = (Vec::new(), text, is_first_implied);
    while !rest.is_empty() {
        let (item, behind) = next_item(rest);
        rest = behind;
        if !item.contains('=') && !std::mem::take(&mut is_implied) {
            let (key, value) = switch(&item);
            warnings.push(format!(
                "short-form boolean option '{item}' deprecated{LINE_END}Please use {key}={value} instead"
            ));
        }
        is_implied = false;
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pairs(text: &str) -> Vec<(String, String)> {
        parse_list(text, BareKey::On).unwrap()
    }

    #[test]
    fn commas_are_doubled_in_values() {
        assert_eq!(pairs("a=1,b=x,,y,c=,,"), [("a", "1"), ("b", "x,y"), ("c", ",")].map(|(k, v)| (k.into(), v.into())));
        assert_eq!(pairs("a=b=c"), [("a".to_owned(), "b=c".to_owned())]);
        assert_eq!(pairs(""), []);
        assert_eq!(pairs("a=1,"), [("a".to_owned(), "1".to_owned())]);
    }

    #[test]
    fn a_key_alone_is_on_or_an_error() {
        assert_eq!(pairs("lazy_refcounts"), [("lazy_refcounts".to_owned(), "on".to_owned())]);
        assert_eq!(pairs("nolazy,nodelay"), [("lazy", "off"), ("nodelay", "on")].map(|(k, v)| (k.into(), v.into())));
        assert!(parse_list("a", BareKey::Refused).is_err());
        assert!(parse_list("=1", BareKey::On).is_err());
        assert!(parse_list("a=1,,,b=2", BareKey::Refused).unwrap()[0].1.ends_with(','));
    }

    proptest! {
        #[test]
        fn any_value_survives_escaping(values in proptest::collection::vec("\\PC*", 1..5)) {
            let text: Vec<String> =
                values.iter().enumerate().map(|(i, value)| format!("k{i}={}", value.replace(',', ",,"))).collect();
            let parsed = parse_list(&text.join(","), BareKey::Refused).unwrap();
            let back: Vec<String> = parsed.into_iter().map(|(_, value)| value).collect();
            // A trailing comma of one value and the separator would read as an escape, were it not for the key.
            prop_assert_eq!(back, values);
        }
    }
}

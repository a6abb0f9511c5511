// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The subject of a certificate: its distinguished name, as a text.

use super::der::{INTEGER, OBJECT_IDENTIFIER, SEQUENCE, SET, VERSION, element, expect};
use std::fmt::Write;

const UTF8_STRING: u8 = 0x0c;
const NUMERIC_STRING: u8 = 0x12;
const PRINTABLE_STRING: u8 = 0x13;
const IA5_STRING: u8 = 0x16;

/// The names of attributes in a text, as QEMU and GnuTLS write them. Others are written as numbers, their values in
/// hexadecimal.
const ATTRIBUTES: &[(&str, &str)] = &[
    ("2.5.4.3", "CN"),
    ("2.5.4.4", "surName"),
    ("2.5.4.5", "serialNumber"),
    ("2.5.4.6", "C"),
    ("2.5.4.7", "L"),
    ("2.5.4.8", "ST"),
    ("2.5.4.9", "street"),
    ("2.5.4.10", "O"),
    ("2.5.4.11", "OU"),
    ("2.5.4.12", "title"),
    ("2.5.4.13", "description"),
    ("2.5.4.15", "businessCategory"),
    ("2.5.4.17", "postalCode"),
    ("2.5.4.41", "name"),
    ("2.5.4.42", "givenName"),
    ("2.5.4.43", "initials"),
    ("2.5.4.44", "generationQualifier"),
    ("2.5.4.46", "dnQualifier"),
    ("2.5.4.65", "pseudonym"),
    ("0.9.2342.19200300.100.1.1", "UID"),
    ("0.9.2342.19200300.100.1.25", "DC"),
    ("1.2.840.113549.1.9.1", "EMAIL"),
    ("1.3.6.1.4.1.311.60.2.1.3", "jurisdictionOfIncorporationCountryName"),
];

/// The subject of a certificate in DER (RFC 5280), for instance `C=GB,O=Example\, Home,CN=laptop`. The attributes have
/// the certificate's order, escaped by RFC 4514. `None` where it can't be parsed.
pub(crate) fn distinguished_name(certificate: &[u8]) -> Option<String> {
    let (mut fields, _) = expect(expect(certificate, SEQUENCE)?.0, SEQUENCE)?;
    if fields.first() == Some(&VERSION) {
        fields = expect(fields, VERSION)?.1;
    }
    // Serial number, signature algorithm, issuer, validity.
    for tag in [INTEGER, SEQUENCE, SEQUENCE, SEQUENCE] {
        fields = expect(fields, tag)?.1;
    }
    let (mut subject, _) = expect(fields, SEQUENCE)?;
    let mut text = String::new();
    while !subject.is_empty() {
        let (mut together, rest) = expect(subject, SET)?;
        subject = rest;
        let mut separator = if text.is_empty() { "" } else { "," };
        while !together.is_empty() {
            let (attribute, rest) = expect(together, SEQUENCE)?;
            together = rest;
            let (kind, value) = expect(attribute, OBJECT_IDENTIFIER)?;
            text.push_str(separator);
            write_attribute(&mut text, &dotted(kind)?, value)?;
            separator = "+";
        }
    }
    Some(text)
}

/// An object identifier as numbers with dots.
fn dotted(bytes: &[u8]) -> Option<String> {
    let mut text = String::new();
    let mut number = 0u64;
    for byte in bytes {
        number = number.checked_mul(128)?.checked_add(u64::from(byte & 0x7f))?;
        if byte & 0x80 == 0 {
            if text.is_empty() {
                // The first two are in one number.
                let first = (number / 40).min(2);
                write!(text, "{first}.{}", number - first * 40).ok()?;
            } else {
                write!(text, ".{number}").ok()?;
            }
            number = 0;
        }
    }
    (!text.is_empty() && bytes.last().is_some_and(|last| last & 0x80 == 0)).then_some(text)
}

fn write_attribute(text: &mut String, kind: &str, value: &[u8]) -> Option<()> {
    let name = ATTRIBUTES.iter().find(|(known, _)| *known == kind).map(|(_, name)| *name);
    let (tag, content, _) = element(value)?;
    let is_text = matches!(tag, UTF8_STRING | NUMERIC_STRING | PRINTABLE_STRING | IA5_STRING);
    let words = std::str::from_utf8(content).ok().filter(|_| is_text);
    write!(text, "{}=", name.unwrap_or(kind)).ok()?;
    match (name, words) {
        (Some(_), Some(words)) => write_escaped(text, words),
        _ => {
            text.push('#');
            for byte in value {
                write!(text, "{byte:02x}").ok()?;
            }
        }
    }
    Some(())
}

fn write_escaped(text: &mut String, words: &str) {
    let last = words.chars().count().saturating_sub(1);
    for (at, letter) in words.chars().enumerate() {
        let is_special = match letter {
            ',' | '+' | '"' | '\\' | '<' | '>' | ';' => true,
            '#' => at == 0,
            ' ' => at == 0 || at == last,
            _ => false,
        };
        if is_special {
            text.push('\\');
        }
        text.push(letter);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn der(tag: u8, content: &[u8]) -> Vec<u8> {
        let len = content.len();
        let head = match len {
            0..=0x7f => vec![tag, len as u8],
            0x80..=0xff => vec![tag, 0x81, len as u8],
            _ => vec![tag, 0x82, (len >> 8) as u8, len as u8],
        };
        [head, content.to_vec()].concat()
    }

    fn attribute(kind: &[u8], tag: u8, value: &str) -> Vec<u8> {
        der(SEQUENCE, &[der(OBJECT_IDENTIFIER, kind), der(tag, value.as_bytes())].concat())
    }

    /// A certificate with these sets of attributes as its subject, without the fields behind.
    fn certificate(sets: &[Vec<u8>]) -> Vec<u8> {
        let subject: Vec<u8> = sets.iter().flat_map(|set| der(SET, set)).collect();
        let head = [der(VERSION, &der(INTEGER, &[2])), der(INTEGER, &[7]), der(SEQUENCE, &[]), der(SEQUENCE, &[])];
        let fields = [head.concat(), der(SEQUENCE, &[]), der(SEQUENCE, &subject)].concat();
        der(SEQUENCE, &der(SEQUENCE, &fields))
    }

    #[test]
    fn a_name_is_written_as_qemu_writes_it() {
        const CN: &[u8] = &[85, 4, 3];
        let one = |kind: &[u8], tag, value| attribute(kind, tag, value);
        for (sets, expected) in [
            (vec![one(&[85, 4, 6], 0x13, "GB"), one(&[85, 4, 10], 0x0c, "Example, Home")], "C=GB,O=Example\\, Home"),
            (vec![one(CN, 0x0c, "  two lead and trail  ")], "CN=\\  two lead and trail \\ "),
            (vec![one(CN, 0x0c, "a+b<c>d;e=f\"\\")], "CN=a\\+b\\<c\\>d\\;e=f\\\"\\\\"),
            (vec![one(CN, 0x0c, "#hash#"), one(CN, 0x0c, " ")], "CN=\\#hash#,CN=\\ "),
            (vec![[one(CN, 0x0c, "x"), one(&[85, 4, 11], 0x0c, "multi")].concat()], "CN=x+OU=multi"),
            (vec![one(CN, 0x0c, "Ünï")], "CN=Ünï"),
            (vec![one(&[42, 3, 4, 5], 0x0c, "custom")], "1.2.3.4.5=#0c06637573746f6d"),
            (vec![one(&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, 1], 0x16, "a@b.c")], "EMAIL=a@b.c"),
            (vec![one(CN, 0x1e, "ab")], "CN=#1e026162"),
            (vec![], ""),
        ] {
            assert_eq!(distinguished_name(&certificate(&sets)).as_deref(), Some(expected));
        }
        let long = "x".repeat(300);
        let name = distinguished_name(&certificate(&[one(CN, 0x0c, &long)])).unwrap();
        assert_eq!(name, format!("CN={long}"));
    }

    #[test]
    fn what_is_no_certificate_has_no_name() {
        let whole = certificate(&[attribute(&[85, 4, 3], 0x0c, "x")]);
        for len in 0..whole.len() {
            assert_eq!(distinguished_name(&whole[..len]), None, "{len}");
        }
        for at in 0..whole.len() {
            for bit in 0..8 {
                let mut broken = whole.clone();
                broken[at] ^= 1 << bit;
                // With any result, it returns.
                let _ = distinguished_name(&broken);
            }
        }
        assert_eq!(dotted(&[0x80]), None);
        assert_eq!(dotted(&[0xff; 12]), None);
        assert_eq!(dotted(&[0x88, 0x37, 3]).as_deref(), Some("2.999.3"));
    }
}

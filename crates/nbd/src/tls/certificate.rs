// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The fields of a certificate (RFC 5280) that its own program checks.

use super::der::{
    BIT_STRING, BOOLEAN, EXTENSIONS, GENERALIZED_TIME, INTEGER, KEY_IDENTIFIER, OBJECT_IDENTIFIER, OCTET_STRING,
    SEQUENCE, UTC_TIME, VERSION, element, expect,
};
use super::identity::distinguished_name;

const SUBJECT_KEY_IDENTIFIER: &[u8] = &[0x55, 0x1d, 14];
const KEY_USAGE: &[u8] = &[0x55, 0x1d, 15];
const BASIC_CONSTRAINTS: &[u8] = &[0x55, 0x1d, 19];
const AUTHORITY_KEY_IDENTIFIER: &[u8] = &[0x55, 0x1d, 35];
const EXTENDED_KEY_USAGE: &[u8] = &[0x55, 0x1d, 37];
/// Any purpose will do.
const ANY_PURPOSE: &[u8] = &[0x55, 0x1d, 37, 0];

/// Uses of a key, by their bit.
#[derive(Clone, Copy)]
pub(super) enum KeyUsage {
    DigitalSignature = 0,
    CertificateSigning = 5,
}

/// Purposes of a certificate.
#[derive(Clone, Copy)]
pub(super) enum Oid {
    ServerAuthentication = 1,
    ClientAuthentication = 2,
}

impl Oid {
    /// The bytes of `1.3.6.1.5.5.7.3.N`.
    fn bytes(self) -> [u8; 8] {
        [0x2b, 6, 1, 5, 5, 7, 3, self as u8]
    }
}

/// An extension: its value, and whether it is critical.
type Extension = Option<(Vec<u8>, bool)>;

#[derive(Clone, Default)]
pub(super) struct Certificate {
    whole: Vec<u8>,
    issuer: Vec<u8>,
    subject: Vec<u8>,
    not_before: i64,
    not_after: i64,
    key: Extension,
    authority_key: Extension,
    basic_constraints: Extension,
    usage: Extension,
    purposes: Extension,
}

impl Certificate {
    /// `None` where the DER can't be parsed.
    pub(super) fn parse(der: &[u8]) -> Option<Certificate> {
        let (mut fields, _) = expect(expect(der, SEQUENCE)?.0, SEQUENCE)?;
        if fields.first() == Some(&VERSION) {
            fields = expect(fields, VERSION)?.1;
        }
        let mut next = |tag| {
            let (content, rest) = expect(fields, tag)?;
            fields = rest;
            Some(content)
        };
        // Serial number, signature algorithm.
        next(INTEGER)?;
        next(SEQUENCE)?;
        let issuer = next(SEQUENCE)?.to_vec();
        let (not_before, not_after) = validity(next(SEQUENCE)?)?;
        let subject = next(SEQUENCE)?.to_vec();
        // The public key; identifiers of issuer and subject may follow it.
        next(SEQUENCE)?;
        let mut found =
            Certificate { whole: der.to_vec(), issuer, subject, not_before, not_after, ..Certificate::default() };
        while let Some((tag, content, rest)) = element(fields) {
            if tag == EXTENSIONS {
                found.take_extensions(expect(content, SEQUENCE)?.0)?;
            }
            fields = rest;
        }
        Some(found)
    }

    fn take_extensions(&mut self, mut list: &[u8]) -> Option<()> {
        while !list.is_empty() {
            let (extension, rest) = expect(list, SEQUENCE)?;
            list = rest;
            let (kind, mut value) = expect(extension, OBJECT_IDENTIFIER)?;
            let mut critical = false;
            if let Some((flag, rest)) = expect(value, BOOLEAN) {
                critical = flag.iter().any(|&byte| byte != 0);
                value = rest;
            }
            let value = expect(value, OCTET_STRING)?.0.to_vec();
            let place = match kind {
                SUBJECT_KEY_IDENTIFIER => &mut self.key,
                AUTHORITY_KEY_IDENTIFIER => &mut self.authority_key,
                BASIC_CONSTRAINTS => &mut self.basic_constraints,
                KEY_USAGE => &mut self.usage,
                EXTENDED_KEY_USAGE => &mut self.purposes,
                _ => continue,
            };
            *place = Some((value, critical));
        }
        Some(())
    }

    /// The first and the last second of its time, since 1970.
    pub(super) fn validity(&self) -> (i64, i64) {
        (self.not_before, self.not_after)
    }

    /// The subject as a text.
    pub(super) fn subject(&self) -> Option<String> {
        distinguished_name(&self.whole)
    }

    /// True by the names and, if both have them, the key identifiers.
    pub(super) fn is_issuer_of(&self, other: &Certificate) -> bool {
        let key = self.key.as_ref().and_then(|(value, _)| Some(expect(value, OCTET_STRING)?.0));
        let authority = other.authority_key.as_ref().and_then(|(value, _)| {
            let (fields, _) = expect(value, SEQUENCE)?;
            Some(expect(fields, KEY_IDENTIFIER)?.0)
        });
        self.subject == other.issuer && key.zip(authority).is_none_or(|(key, authority)| key == authority)
    }

    /// Whether basic constraints show an authority; `None` without any.
    pub(super) fn is_authority(&self) -> Option<bool> {
        let (value, _) = self.basic_constraints.as_ref()?;
        let shown = expect(value, SEQUENCE).and_then(|(fields, _)| expect(fields, BOOLEAN));
        Some(shown.is_some_and(|(flag, _)| flag.iter().any(|&byte| byte != 0)))
    }

    /// Whether the key may be used so, and whether that is critical; `None` where the certificate doesn't have that.
    pub(super) fn permits(&self, usage: KeyUsage) -> Option<(bool, bool)> {
        let (value, critical) = self.usage.as_ref()?;
        // The first byte counts the bits that the last one lacks.
        let bits = expect(value, BIT_STRING).and_then(|(content, _)| content.get(1)).copied().unwrap_or_default();
        Some((bits & (0x80 >> usage as u8) != 0, *critical))
    }

    /// Whether the certificate is for this purpose, and whether that is critical; `None` where it doesn't have that.
    pub(super) fn has_purpose(&self, purpose: Oid) -> Option<(bool, bool)> {
        let (value, critical) = self.purposes.as_ref()?;
        let mut list = expect(value, SEQUENCE).map_or(&[][..], |(list, _)| list);
        let mut found = false;
        while let Some((kind, rest)) = expect(list, OBJECT_IDENTIFIER) {
            found |= kind == purpose.bytes() || kind == ANY_PURPOSE;
            list = rest;
        }
        Some((found, *critical))
    }
}

fn validity(fields: &[u8]) -> Option<(i64, i64)> {
    let (first, from, rest) = element(fields)?;
    let (second, to, _) = element(rest)?;
    Some((seconds(first, from)?, seconds(second, to)?))
}

/// Seconds since 1970 of `YYMMDDHHMMSSZ` or `YYYYMMDDHHMMSSZ`, the two spellings that RFC 5280 has.
fn seconds(tag: u8, text: &[u8]) -> Option<i64> {
    let digits = text.strip_suffix(b"Z")?;
    let number = |from: usize, len: usize| {
        let part = digits.get(from..from + len)?;
        part.iter().try_fold(0i64, |sum, byte| byte.is_ascii_digit().then(|| sum * 10 + i64::from(byte - b'0')))
    };
    let (year, at) = match (tag, digits.len()) {
        (UTC_TIME, 12) => (number(0, 2).map(|year| if year < 50 { 2000 + year } else { 1900 + year })?, 2),
        (GENERALIZED_TIME, 14) => (number(0, 4)?, 4),
        _ => return None,
    };
    let (month, day) = (number(at, 2)?, number(at + 2, 2)?);
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    // Days since 1970, with years that begin in March.
    let years = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (years.div_euclid(400), years.rem_euclid(400));
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let days = era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468;
    Some(((days * 24 + number(at + 4, 2)?) * 60 + number(at + 6, 2)?) * 60 + number(at + 8, 2)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_seconds() {
        for (tag, text, expected) in [
            (UTC_TIME, "700101000000Z", Some(0)),
            (UTC_TIME, "491231235959Z", Some(2_524_607_999)),
            (UTC_TIME, "500101000000Z", Some(-631_152_000)),
            (GENERALIZED_TIME, "20240229120000Z", Some(1_709_208_000)),
            (GENERALIZED_TIME, "99991231235959Z", Some(253_402_300_799)),
            (GENERALIZED_TIME, "20241301000000Z", None),
            (GENERALIZED_TIME, "202402291200Z", None),
            (UTC_TIME, "7001010000x0Z", None),
            (UTC_TIME, "700101000000+0100", None),
            (INTEGER, "700101000000Z", None),
        ] {
            assert_eq!(seconds(tag, text.as_bytes()), expected, "{text}");
        }
    }

    #[test]
    fn no_bytes_do_harm() {
        let mut random = 1u64;
        for len in 0..400usize {
            let bytes: Vec<u8> = (0..len)
                .map(|at| {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    // Tags and short lengths, so that some of it parses.
                    [SEQUENCE, INTEGER, (random >> 33) as u8, (len - at) as u8][(random >> 60) as usize % 4]
                })
                .collect();
            let _ = Certificate::parse(&bytes);
            let mut own = Certificate::default();
            let _ = own.take_extensions(&bytes);
            own.usage = Some((bytes.clone(), true));
            own.purposes = Some((bytes, true));
            let _ = (own.permits(KeyUsage::CertificateSigning), own.has_purpose(Oid::ClientAuthentication));
        }
    }
}

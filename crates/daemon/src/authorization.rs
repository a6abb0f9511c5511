// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The clients that may come, by the distinguished name in their certificate: `authz-simple`, `authz-list`,
//! `authz-listfile`.

use cowshed_nbd_server::Authorizer;
use cowshed_qmp::{QmpError, QmpResult, parse_json};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// The permitted clients.
#[derive(Debug)]
pub(crate) enum Authorization {
    /// The one with this name.
    Simple { identity: String },
    /// The first rule that fits a name decides; else the policy.
    List(Rules),
    /// The same from a file, as it was when the object was made, or (`refresh`) as it is.
    ListFile { path: PathBuf, refresh: bool, loaded: Mutex<Loaded> },
}

/// Rules, and the policy where none fits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rules {
    allows: bool,
    rules: Vec<Rule>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    pattern: String,
    /// Whether it is a glob; `None` where that isn't said, which is an exact name.
    is_glob: Option<bool>,
    allows: bool,
}

/// The rules of a file when it had this time and length.
#[derive(Debug)]
pub(crate) struct Loaded {
    stamp: Option<(SystemTime, u64)>,
    rules: Rules,
}

impl Authorization {
    /// From a file. A file that can't be read or parsed is an error.
    pub fn from_file(path: &Path, refresh: bool) -> QmpResult<Authorization> {
        let loaded = Mutex::new(Loaded::read(path)?);
        Ok(Authorization::ListFile { path: path.to_owned(), refresh, loaded })
    }

    /// Whether the client with this name may come. A file that has changed and can't be used any more refuses every
    /// client.
    fn allows(&self, identity: &str) -> QmpResult<bool> {
        match self {
            Authorization::Simple { identity: wanted } => Ok(identity == wanted),
            Authorization::List(rules) => Ok(rules.allow(identity)),
            Authorization::ListFile { path, refresh, loaded } => {
                let mut loaded = lock(loaded);
                if *refresh && loaded.stamp != stamp(path) {
                    *loaded = Loaded::read(path)?;
                }
                Ok(loaded.rules.allow(identity))
            }
        }
    }

    /// The value of a property.
    pub fn get(&self, property: &str) -> Option<Value> {
        match (self, property) {
            (Authorization::Simple { identity }, "identity") => Some(json!(identity)),
            (Authorization::List(rules), "policy") => Some(json!(policy(rules.allows))),
            (Authorization::List(rules), "rules") => Some(rules.rules.iter().map(Rule::to_json).collect()),
            (Authorization::ListFile { path, .. }, "filename") => Some(json!(path.to_string_lossy())),
            (Authorization::ListFile { refresh, .. }, "refresh") => Some(json!(refresh)),
            _ => None,
        }
    }

    /// With another value of a property. `None`: it stays as it was made.
    pub fn with(&self, property: &str, value: &Value) -> QmpResult<Option<Authorization>> {
        let expected =
            |kind: &str| QmpError::generic(format!("Invalid parameter type for '{property}', expected: {kind}"));
        Ok(match (self, property) {
            (Authorization::Simple { .. }, "identity") => {
                let identity = value.as_str().ok_or_else(|| expected("string"))?.to_owned();
                Some(Authorization::Simple { identity })
            }
            (Authorization::List(rules), "policy") => {
                value.as_str().ok_or_else(|| expected("string"))?;
                Some(Authorization::List(Rules { allows: parse_policy(value)?, ..rules.clone() }))
            }
            (Authorization::List(rules), "rules") => {
                Some(Authorization::List(Rules { rules: Rule::list(value)?, ..rules.clone() }))
            }
            _ => None,
        })
    }

    /// Its type.
    pub fn kind(&self) -> &'static str {
        match self {
            Authorization::Simple { .. } => "authz-simple",
            Authorization::List(_) => "authz-list",
            Authorization::ListFile { .. } => "authz-listfile",
        }
    }
}

impl Rules {
    /// From `policy` (`deny` by default) and `rules`: each with `match`, `policy`, and `format` where it isn't `exact`.
    pub fn from_json(given: &serde_json::Map<String, Value>) -> QmpResult<Rules> {
        let allows = parse_policy(given.get("policy").unwrap_or(&json!("deny")))?;
        let rules = given.get("rules").map_or_else(|| Ok(Vec::new()), Rule::list)?;
        let unknown = given.keys().find(|key| !["policy", "rules", "qom-type", "id"].contains(&key.as_str()));
        match unknown {
            Some(key) => Err(QmpError::generic(format!("Parameter '{key}' is unexpected"))),
            None => Ok(Rules { allows, rules }),
        }
    }

    fn allow(&self, identity: &str) -> bool {
        self.rules.iter().find(|rule| rule.fits(identity)).map_or(self.allows, |rule| rule.allows)
    }
}

impl Rule {
    fn list(given: &Value) -> QmpResult<Vec<Rule>> {
        let wrong = || QmpError::generic("Invalid parameter type for 'rules', expected: array");
        let rules = given.as_array().ok_or_else(wrong)?;
        rules.iter().enumerate().map(|(number, rule)| Rule::from_json(number, rule)).collect()
    }

    fn from_json(number: usize, given: &Value) -> QmpResult<Rule> {
        let expected = |of: &str, kind: &str| {
            QmpError::generic(format!("Invalid parameter type for 'rules[{number}]{of}', expected: {kind}"))
        };
        let given = given.as_object().ok_or_else(|| expected("", "object"))?;
        let text = |key: &str| match given.get(key) {
            Some(value) => value.as_str().map(Some).ok_or_else(|| expected(&format!(".{key}"), "string")),
            None => Ok(None),
        };
        let needed = |key: &str| {
            let missing = || QmpError::generic(format!("Parameter 'rules[{number}].{key}' is missing"));
            text(key)?.ok_or_else(missing)
        };
        let rule = Rule {
            pattern: needed("match")?.to_owned(),
            allows: parse_policy(&needed("policy")?.into())?,
            is_glob: match text("format")? {
                None => None,
                Some("exact") => Some(false),
                Some("glob") => Some(true),
                other => return Err(not_accepted("format", other)),
            },
        };
        match given.keys().find(|key| !["match", "policy", "format"].contains(&key.as_str())) {
            Some(key) => Err(QmpError::generic(format!("Parameter 'rules[{number}].{key}' is unexpected"))),
            None => Ok(rule),
        }
    }

    fn to_json(&self) -> Value {
        let mut shown = json!({"match": self.pattern, "policy": policy(self.allows)});
        if let Some(is_glob) = self.is_glob {
            shown["format"] = json!(if is_glob { "glob" } else { "exact" });
        }
        shown
    }

    fn fits(&self, identity: &str) -> bool {
        match self.is_glob == Some(true) {
            true => glob_fits(&self.pattern, identity),
            false => self.pattern == identity,
        }
    }
}

impl Loaded {
    fn read(path: &Path) -> QmpResult<Loaded> {
        let name = path.display();
        // Before the content: one that changes meanwhile is read again.
        let stamp = stamp(path);
        let text = std::fs::read_to_string(path).map_err(|error| {
            let words = error.to_string();
            let words = words.split(" (os error ").next().unwrap_or_default();
            QmpError::generic(format!("Unable to read '{name}': {words}"))
        })?;
        let unreadable = |error: &str| QmpError::generic(format!("Unable to parse '{name}': {error}"));
        let parsed = match parse_json(text.as_bytes()).map_err(|error| unreadable(&error))? {
            Value::Object(map) => map,
            _ => return Err(unreadable("the rules must be a JSON object")),
        };
        let rules = Rules::from_json(&parsed)
            .map_err(|error| QmpError::generic(format!("Unable to parse '{name}': {}", error.description)))?;
        Ok(Loaded { stamp, rules })
    }
}

fn stamp(path: &Path) -> Option<(SystemTime, u64)> {
    let facts = std::fs::metadata(path).ok()?;
    Some((facts.modified().ok()?, facts.len()))
}

fn policy(allows: bool) -> &'static str {
    if allows { "allow" } else { "deny" }
}

fn parse_policy(given: &Value) -> QmpResult<bool> {
    match given.as_str() {
        Some("allow") => Ok(true),
        Some("deny") => Ok(false),
        other => Err(not_accepted("policy", other)),
    }
}

fn not_accepted(key: &str, value: Option<&str>) -> QmpError {
    QmpError::generic(format!("Parameter '{key}' does not accept value '{}'", value.unwrap_or_default()))
}

/// As QEMU's globs: `*` is any text, `?` any letter, everything else itself.
fn glob_fits(pattern: &str, text: &str) -> bool {
    let (pattern, text): (Vec<char>, Vec<char>) = (pattern.chars().collect(), text.chars().collect());
    let (mut p, mut t) = (0, 0);
    // The last star, and how much of the text it stands for.
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        match (pattern.get(p), star) {
            (Some('*'), _) => {
                star = Some((p, t));
                p += 1;
            }
            (Some(&letter), _) if letter == '?' || letter == text[t] => (p, t) = (p + 1, t + 1),
            (_, Some((at, taken))) => {
                star = Some((at, taken + 1));
                (p, t) = (at + 1, taken + 1);
            }
            (_, None) => return false,
        }
    }
    pattern[p..].iter().all(|&letter| letter == '*')
}

/// The authorizations by the id of their object, for the threads that serve.
#[derive(Clone, Debug, Default)]
pub(crate) struct Authorizations(Arc<Mutex<BTreeMap<String, Arc<Authorization>>>>);

impl Authorizations {
    /// Adds one, or takes it away.
    pub fn set(&self, id: &str, authorization: Option<Arc<Authorization>>) {
        let mut known = lock(&self.0);
        match authorization {
            Some(authorization) => known.insert(id.to_owned(), authorization),
            None => known.remove(id),
        };
    }

    /// An authorizer that asks the object `id`, which need not be there yet: until then every client is refused.
    pub fn authorizer(&self, id: &str) -> Authorizer {
        let (all, id) = (self.clone(), id.to_owned());
        Authorizer(Arc::new(move |identity| {
            let found = lock(&all.0).get(&id).cloned();
            let found = found.ok_or_else(|| format!("Cannot find QAuthZ object ID {id}"))?;
            match found.allows(identity) {
                Ok(true) => Ok(()),
                Ok(false) => Err(format!("TLS x509 authz check for {identity} is denied")),
                Err(error) => Err(error.description),
            }
        }))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(text: &str) -> QmpResult<Rules> {
        Rules::from_json(serde_json::from_str::<Value>(text).unwrap().as_object().unwrap())
    }

    #[test]
    fn globs_have_stars_and_question_marks() {
        for (pattern, fits) in [
            ("C=?B*", true),
            ("C=GB,O=a\\, b,CN=x", true),
            ("*", true),
            ("**x", true),
            ("*,O=*,CN=?", true),
            ("*O=a?, b*", true),
            ("C=[A-Z]B*", false),
            ("c=GB*", false),
            ("C=GB", false),
            ("*C", false),
            ("C=GB,O=a\\, b,CN=x?", false),
            ("", false),
        ] {
            assert_eq!(glob_fits(pattern, "C=GB,O=a\\, b,CN=x"), fits, "{pattern}");
        }
        assert!(glob_fits("", "") && glob_fits("*", "") && glob_fits("?n?", "Ünï") && !glob_fits("?", ""));
    }

    #[test]
    fn the_first_rule_that_fits_decides_and_else_the_policy() {
        let list = r#"{"policy": "deny", "rules": [{"match": "CN=bad", "policy": "deny"},
                      {"match": "CN=*", "policy": "allow", "format": "glob"}, {"match": "O=x", "policy": "allow"}]}"#;
        let found = rules(list).unwrap();
        let allowed = ["CN=bad", "CN=good", "O=x", "O=y", "O=*"].map(|name| found.allow(name));
        assert_eq!(allowed, [false, true, true, false, false]);
        assert!(!rules("{}").unwrap().allow("x") && rules(r#"{"policy": "allow"}"#).unwrap().allow("x"));
        for (wrong, reason) in [
            (r#"{"policy": "maybe"}"#, "'policy' does not accept value 'maybe'"),
            (r#"{"rules": {}}"#, "'rules', expected: array"),
            (r#"{"rules": [{"match": "x"}]}"#, "'rules[0].policy' is missing"),
            (r#"{"rules": [{"policy": "deny"}]}"#, "'rules[0].match' is missing"),
            (r#"{"rules": [{"match": "x", "policy": "deny", "format": "re"}]}"#, "'format' does not accept value 're'"),
            (r#"{"rules": [{"match": "x", "policy": "deny", "fromat": "glob"}]}"#, "'rules[0].fromat' is unexpected"),
            (r#"{"polcy": "allow"}"#, "'polcy' is unexpected"),
        ] {
            assert!(rules(wrong).unwrap_err().description.contains(reason), "{wrong}");
        }
    }

    #[test]
    fn a_file_of_rules_is_read_again_when_it_changes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("acl");
        assert!(Authorization::from_file(&path, true).unwrap_err().description.contains("acl"));
        std::fs::write(&path, r#"{"policy": "allow"}"#).unwrap();
        let (live, fixed) = (Authorization::from_file(&path, true), Authorization::from_file(&path, false));
        let (live, fixed) = (live.unwrap(), fixed.unwrap());
        assert!(live.allows("x").unwrap() && fixed.allows("x").unwrap());
        std::fs::write(&path, r#"{"policy": "deny", "rules": []}"#).unwrap();
        assert!(!live.allows("x").unwrap() && fixed.allows("x").unwrap());
        // A broken list refuses every client, until it is right again.
        std::fs::write(&path, "{").unwrap();
        assert!(live.allows("x").unwrap_err().description.contains("Unable to parse"));
        std::fs::remove_file(&path).unwrap();
        assert!(live.allows("x").unwrap_err().description.contains("Unable to read"));
        std::fs::write(&path, r#"{"policy": "allow", "rules": []}"#).unwrap();
        assert!(live.allows("x").unwrap() && fixed.allows("x").unwrap());
    }

    #[test]
    fn an_absent_object_lets_no_client_in() {
        let all = Authorizations::default();
        let Authorizer(check) = all.authorizer("a");
        assert_eq!(check("CN=x").unwrap_err(), "Cannot find QAuthZ object ID a");
        all.set("a", Some(Arc::new(Authorization::Simple { identity: "CN=x".to_owned() })));
        assert!(check("CN=x").is_ok());
        assert_eq!(check("CN=y").unwrap_err(), "TLS x509 authz check for CN=y is denied");
        all.set("a", None);
        assert!(check("CN=x").is_err());
    }
}

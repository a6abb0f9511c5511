// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `--fault` of command lines: a rule, or a file with a list of them.

use super::SCHEMA;
use super::rules::{FaultRule, RULE};
use crate::options::{BareKey, BlockdevOptions, check_list, parse_list};
use cowshed_types::{Error, Result};
use serde_json::{Map, Value};

/// The key of the seed of chance, beside the keys of any rule, or alone.
const SEED: &str = "seed";

/// The options of a `fault` node, without its name and its file, from the values of a command line. Each text is a rule
/// (`op=read,errno=5,…`), or the name of a file with rules. `None` without a text.
///
/// # Errors
/// For a text that is no rule, a rule without effect, a second file or seed. The node's opening reads the file.
pub fn fault_options(texts: &[String]) -> Result<Option<BlockdevOptions>> {
    let (mut rules, mut scenario, mut seed) = (Vec::new(), None, None);
    for text in texts {
        let named = |error: Error| error.file(format!("--fault {text}"));
        let wrong = |message: &str| named(Error::invalid_argument(message));
        if text.is_empty() {
            return Err(wrong("a rule, or the name of a file with rules, is missing"));
        }
        // A path with such a sign in it has a '/' before.
        if !text.split('/').next().is_some_and(|first| first.contains('=')) {
            if scenario.replace(text.as_str()).is_some() {
                return Err(wrong("the rules can be in one file only"));
            }
            continue;
        }
        let mut rule = Map::new();
        for (key, value) in parse_list(text, BareKey::On).map_err(named)? {
            let before = match key == SEED {
                true => seed.replace(value).is_some(),
                false => rule.insert(key.clone(), value.into()).is_some(),
            };
            if before {
                return Err(wrong(&format!("'{key}' is given twice")));
            }
        }
        if !rule.is_empty() {
            rules.push(checked(rule).map_err(named)?);
        }
    }
    let options = BlockdevOptions::new().with("driver", SCHEMA.name).with("rules", Value::Array(rules));
    let options = scenario.into_iter().fold(options, |options, path| options.with("scenario", path));
    let options = seed.into_iter().fold(options, |options, seed| options.with(SEED, seed));
    Ok((!texts.is_empty()).then_some(options))
}

fn checked(rule: Map<String, Value>) -> Result<Value> {
    let mut rules = [Value::Object(rule)];
    check_list(RULE, &mut rules, "rules")?;
    let [rule] = rules;
    let why = rule.as_object().and_then(FaultRule::from_options).and_then(|rule| rule.no_effect());
    match why {
        Some(why) => Err(Error::invalid_argument(format!("this rule has no effect: {why}"))),
        None => Ok(rule),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn options(texts: &[&str]) -> Result<Option<Value>> {
        let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
        fault_options(&texts).map(|options| options.map(Value::from))
    }

    #[test]
    fn a_text_is_a_rule_or_a_file() {
        assert_eq!(options(&[]).unwrap(), None);
        let rules = json!([{"op": "read", "errno": 28, "offset": 1 << 20, "once": true}, {"op": "flush"}]);
        let given = ["op=read,errno=28,offset=1M,once", "a/b=c.json", "seed=7", "op=flush"];
        let expected = json!({"driver": "fault", "rules": rules, "scenario": "a/b=c.json", "seed": "7"});
        assert_eq!(options(&given).unwrap(), Some(expected));
    }

    #[test]
    fn what_is_neither_is_refused() {
        for (texts, words) in [
            (&[""][..], "is missing"),
            (&["op=seek"], "--fault op=seek: Parameter 'rules.0.op' expects one of read"),
            (&["errno=5"], "'rules.0.op' is missing"),
            (&["op=read,colour=1"], "colour"),
            (&["op=read,errno=5,errno=6"], "'errno' is given twice"),
            (&["op=read,seed=1", "seed=2"], "'seed' is given twice"),
            (&["a.json", "b.json"], "one file only"),
            (&["op=read,action=stuck"], "no effect: 'action': 'stuck' is not for reads"),
            (&["op=read,action=misdirect,distance=0"], "no effect: 'distance': 0 is the place of the request"),
            (&["op=read,action=delay"], "no effect: 'action': 'delay' needs 'delay-ms' or 'jitter-ms'"),
        ] {
            let error = options(texts).unwrap_err().to_string();
            assert!(error.contains(words), "{texts:?}: {error}");
        }
    }
}

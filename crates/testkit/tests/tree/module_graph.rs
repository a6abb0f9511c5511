// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The arrows between the modules of a crate, computed from the paths that their code names. No two modules need each other, but for
//! the circles that are listed here.

use super::crate_graph::rust_files;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Module → the modules that its code names.
type Arrows = BTreeMap<String, BTreeSet<String>>;

/// Module of `graph` → the modules of `graph` that its code names. A new arrow is a new word here, and makes no new circle.
const GRAPH_ARROWS: &[(&str, &[&str])] = &[
    ("buffers", &[]),
    ("dirty", &[]),
    ("encryption", &["buffers", "events", "secret"]),
    ("events", &[]),
    ("filters", &["dirty", "events", "node", "options"]),
    ("graph", &["encryption", "events", "filters", "nbd_client", "node", "options", "secret", "stats"]),
    ("nbd_client", &[]),
    ("node", &["dirty", "encryption", "events", "options", "stats"]),
    ("open", &["filters", "graph", "nbd_client", "node", "options", "protocols", "secret"]),
    ("options", &["nbd_client"]),
    ("partitions", &["node"]),
    ("protocols", &["nbd_client", "node"]),
    ("secret", &[]),
    ("stats", &[]),
];

/// Crates whose modules are compared, each with those of them that need one another.
///
/// - `cowshed`: the command line knows the verbs, and the verbs know its words.
/// - `create`: the line of a format has its options, and lays out its images by them.
/// - `formats`: a disk in blocks, the units in which it grows, and its writer are one object in three files.
/// - `storage`: a file, the media that it may stand on, and their faults.
/// - Servers (`fuse`, `http-server`, `nbd-server`, `vhost-user`): sessions, their server and their requests.
const CIRCLES: &[(&str, &[&str])] = &[
    ("cowshed", &["commands", "invocation", "io", "output"]),
    ("create", &["encryption", "file", "fresh", "layout", "qcow2", "schema"]),
    ("crypto", &["blocks", "sectors"]),
    ("daemon", &[]),
    ("formats", &["blocks", "units", "writer"]),
    ("fuse", &["operations", "running", "server", "session"]),
    ("graph", &[]),
    ("http-server", &["connection", "server"]),
    ("jobs", &[]),
    ("nbd", &[]),
    ("nbd-server", &["admission", "commands", "intake", "registry", "session", "status"]),
    ("offline", &[]),
    ("qcow2", &[]),
    ("rescue", &["damaged_image", "orphans"]),
    ("storage", &["cache", "fault", "file", "medium", "remote"]),
    ("vhost-user", &["queue", "requests", "server", "session", "slots"]),
];

/// The modules of a crate, each with those that its code names, tests apart.
fn arrows(krate: &str) -> Arrows {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(krate).join("src");
    let mut arrows = Arrows::new();
    for path in rust_files(&source).into_iter().filter(|path| !path.ends_with("tests.rs")) {
        let within = path.strip_prefix(&source).expect("a file of the folder").with_extension("");
        let module = within.components().next().expect("a name").as_os_str().to_string_lossy().into_owned();
        let is_file = within.components().count() == 1;
        let text = std::fs::read_to_string(&path).expect("a source file is readable");
        let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
        let named = arrows.entry(module.clone()).or_default();
        let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
        let code = lines.collect::<Vec<_>>().join("\n");
        let by_crate = code.split("crate::").skip(1);
        let by_super = code.split("super::").skip(1).filter(|_| is_file);
        named.extend(by_crate.chain(by_super).flat_map(first_names).filter(|name| *name != module));
    }
    arrows.remove("lib");
    arrows.remove("main");
    let modules: BTreeSet<String> = arrows.keys().cloned().collect();
    // Other names behind `crate::` are functions and macros of the crate's root.
    arrows.values_mut().for_each(|named| named.retain(|name| modules.contains(name)));
    arrows
}

/// The first names of the paths behind `crate::`: one, or those of a group.
fn first_names(after: &str) -> Vec<String> {
    let name_of = |path: &str| -> String {
        path.trim_start().chars().take_while(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || *c == '_').collect()
    };
    let Some(group) = after.strip_prefix('{') else { return vec![name_of(after)] };
    let (mut names, mut depth) = (vec![name_of(group)], 0);
    for (at, letter) in group.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => names.push(name_of(&group[at + 1..])),
            _ => {}
        }
    }
    names.retain(|name| !name.is_empty());
    names
}

/// The modules that need themselves by way of others.
fn circle(arrows: &Arrows) -> BTreeSet<String> {
    let reached = |start: &String| {
        let (mut seen, mut open) = (BTreeSet::new(), vec![start.clone()]);
        while let Some(next) = open.pop() {
            open.extend(arrows.get(&next).into_iter().flatten().filter(|name| seen.insert((*name).clone())).cloned());
        }
        seen
    };
    arrows.keys().filter(|module| reached(module).contains(*module)).cloned().collect()
}

fn texts(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn modules_of_the_graph_name_one_another_only_along_the_arrows() {
    let found = arrows("graph");
    let allowed: Arrows = GRAPH_ARROWS.iter().map(|(module, names)| ((*module).to_owned(), texts(names))).collect();
    assert!(found["open"].contains("graph"), "the test sees no arrows");
    assert_eq!(found, allowed, "an arrow that isn't in GRAPH_ARROWS, or one there that is gone");
}

#[test]
fn no_two_modules_need_each_other() {
    for (krate, known) in CIRCLES {
        let found = arrows(krate);
        assert!(found.len() > 3, "{krate}: the test sees no modules");
        assert_eq!(circle(&found), texts(known), "{krate}: modules that need themselves by way of others");
    }
}

#[test]
fn names_in_a_group_are_found() {
    assert_eq!(first_names("open::build;"), ["open"]);
    let group = "{\n    Error, graph::{Graph, changes},\n    node::Node, qcow2};\nuse other::Thing;";
    assert_eq!(first_names(group), ["graph", "node", "qcow2"]);
}

#[test]
fn a_circle_is_found() {
    let arrows: Arrows = [("a", &["b"][..]), ("b", &["c"]), ("c", &["a", "d"]), ("d", &[])]
        .map(|(from, to)| (from.to_owned(), texts(to)))
        .into();
    assert_eq!(circle(&arrows), texts(&["a", "b", "c"]));
}

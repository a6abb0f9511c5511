// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The arrows between the crates, proven from `cargo metadata`: a layer can't grow a dependency unnoticed.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// Crate → the crates of the workspace that it may depend on. A new crate is a new line here.
const ARROWS: &[(&str, &[&str])] = &[
    ("cowshed-types", &[]),
    ("cowshed-codec", &["cowshed-types"]),
    ("cowshed-layout", &["cowshed-types"]),
    ("cowshed-crypto", &["cowshed-types", "cowshed-layout"]),
    ("cowshed-offline", &["cowshed-types", "cowshed-layout", "cowshed-qcow2", "cowshed-storage"]),
    ("cowshed-ova", &["cowshed-types", "cowshed-layout"]),
    ("cowshed-qmp", &[]),
    ("cowshed-qcow2", &["cowshed-types", "cowshed-layout"]),
    ("cowshed-storage", &["cowshed-types"]),
    ("cowshed-simulator", &["cowshed-types", "cowshed-storage"]),
    (
        "cowshed-graph",
        &[
            "cowshed-types",
            "cowshed-codec",
            "cowshed-crypto",
            "cowshed-layout",
            "cowshed-nbd",
            "cowshed-nbd-proto",
            "cowshed-qmp",
            "cowshed-storage",
        ],
    ),
    (
        "cowshed-formats",
        &[
            "cowshed-types",
            "cowshed-codec",
            "cowshed-crypto",
            "cowshed-graph",
            "cowshed-layout",
            "cowshed-offline",
            "cowshed-qcow2",
            "cowshed-storage",
        ],
    ),
    ("cowshed-image", &["cowshed-types", "cowshed-formats", "cowshed-graph"]),
    (
        "cowshed-rescue",
        &[
            "cowshed-types",
            "cowshed-codec",
            "cowshed-crypto",
            "cowshed-image",
            "cowshed-layout",
            "cowshed-offline",
            "cowshed-storage",
        ],
    ),
    ("cowshed-create", &["cowshed-types", "cowshed-crypto", "cowshed-image", "cowshed-layout", "cowshed-storage"]),
    ("cowshed-nbd-proto", &["cowshed-types"]),
    ("cowshed-fuse-proto", &[]),
    ("cowshed-fuse", &["cowshed-types", "cowshed-fuse-proto", "cowshed-image", "cowshed-storage"]),
    ("cowshed-ublk-proto", &[]),
    ("cowshed-ublk", &["cowshed-types", "cowshed-image", "cowshed-storage", "cowshed-ublk-proto"]),
    ("cowshed-vhost-user-proto", &[]),
    ("cowshed-vhost-user", &["cowshed-types", "cowshed-image", "cowshed-storage", "cowshed-vhost-user-proto"]),
    ("cowshed-nbd", &["cowshed-types", "cowshed-nbd-proto", "cowshed-storage"]),
    ("cowshed-nbd-server", &["cowshed-types", "cowshed-image", "cowshed-nbd", "cowshed-nbd-proto", "cowshed-storage"]),
    ("cowshed-http-server", &["cowshed-types", "cowshed-image", "cowshed-nbd", "cowshed-storage"]),
    (
        "cowshed-jobs",
        &[
            "cowshed-types",
            "cowshed-codec",
            "cowshed-create",
            "cowshed-layout",
            "cowshed-offline",
            "cowshed-qcow2",
            "cowshed-rescue",
            "cowshed-storage",
            "cowshed-image",
        ],
    ),
    (
        "cowshed",
        &[
            "cowshed-types",
            "cowshed-codec",
            "cowshed-create",
            "cowshed-layout",
            "cowshed-offline",
            "cowshed-ova",
            "cowshed-qcow2",
            "cowshed-storage",
            "cowshed-image",
            "cowshed-jobs",
            "cowshed-daemon",
            "cowshed-fuse",
            "cowshed-http-server",
            "cowshed-nbd",
        ],
    ),
    (
        "cowshed-daemon",
        &[
            "cowshed-types",
            "cowshed-create",
            "cowshed-fuse",
            "cowshed-http-server",
            "cowshed-image",
            "cowshed-jobs",
            "cowshed-nbd",
            "cowshed-nbd-proto",
            "cowshed-nbd-server",
            "cowshed-qmp",
            "cowshed-storage",
            "cowshed-ublk",
            "cowshed-vhost-user",
        ],
    ),
    ("cowshed-testbase", &[]),
    (
        "cowshed-testkit",
        &[
            "cowshed-testbase",
            "cowshed-types",
            "cowshed-codec",
            "cowshed-create",
            "cowshed-layout",
            "cowshed-offline",
            "cowshed-ova",
            "cowshed-qcow2",
            "cowshed-simulator",
            "cowshed-storage",
            "cowshed-image",
            "cowshed-jobs",
            "cowshed-fuse-proto",
            "cowshed-http-server",
            "cowshed-nbd-proto",
            "cowshed-ublk-proto",
            "cowshed-vhost-user-proto",
        ],
    ),
    (
        "cowshed-bench",
        &[
            "cowshed-types",
            "cowshed-layout",
            "cowshed-qcow2",
            "cowshed-storage",
            "cowshed-image",
            "cowshed-jobs",
            "cowshed-nbd-proto",
            "cowshed-vhost-user-proto",
            "cowshed-testkit",
        ],
    ),
];

/// Crates that must build without a runtime, the C library or a way to reach the operating system.
const PURE: &[&str] = &[
    "cowshed-types",
    "cowshed-fuse-proto",
    "cowshed-layout",
    "cowshed-nbd-proto",
    "cowshed-qcow2",
    "cowshed-qmp",
    "cowshed-ublk-proto",
    "cowshed-vhost-user-proto",
];

/// The crates that none of [`PURE`] may reach, however far down.
const RUNTIMES: &[&str] = &[
    "async-task",
    "compio",
    "crossbeam-channel",
    "futures-util",
    "io-uring",
    "libc",
    "mio",
    "nix",
    "ring",
    "rustls",
    "rustix",
    "smol",
    "tempfile",
    "tokio",
];

/// The one file of [`PURE`] that reads the environment. It is part of a build of `scripts/mutants` or `scripts/without` alone.
const SWITCHES: &str = "types/src/switches.rs";

/// Standard-library modules that none of [`PURE`] may name.
const SYSTEM_MODULES: &[&str] =
    &["std::fs", "std::io", "std::net", "std::os", "std::process", "std::thread", "std::env"];

struct Graph {
    /// Package → the packages that its library and binaries need (not its tests).
    normal: BTreeMap<String, BTreeSet<String>>,
    members: BTreeSet<String>,
}

fn graph() -> Graph {
    let output = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".into()))
        .args(["metadata", "--format-version=1", "--locked", "--filter-platform=x86_64-unknown-linux-gnu"])
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo prints JSON");
    let array = |value: &Value| value.as_array().expect("an array").clone();
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let names: BTreeMap<String, String> =
        array(&metadata["packages"]).iter().map(|package| (text(&package["id"]), text(&package["name"]))).collect();
    let is_normal = |edge: &Value| array(&edge["dep_kinds"]).iter().any(|kind| kind["kind"].is_null());
    let normal = array(&metadata["resolve"]["nodes"]).into_iter().map(|node| {
        let needs =
            array(&node["deps"]).iter().filter(|e| is_normal(e)).map(|e| names[&text(&e["pkg"])].clone()).collect();
        (names[&text(&node["id"])].clone(), needs)
    });
    Graph {
        normal: normal.collect(),
        members: array(&metadata["workspace_members"]).iter().map(|id| names[&text(id)].clone()).collect(),
    }
}

/// Everything reached from `start`.
fn reached(graph: &Graph, start: &str) -> BTreeSet<String> {
    let (mut seen, mut open) = (BTreeSet::new(), vec![start.to_owned()]);
    while let Some(package) = open.pop() {
        for next in graph.normal.get(&package).into_iter().flatten() {
            if seen.insert(next.clone()) {
                open.push(next.clone());
            }
        }
    }
    seen
}

#[test]
fn crates_depend_only_along_the_arrows() {
    let graph = graph();
    let arrows: BTreeMap<&str, &[&str]> = ARROWS.iter().copied().collect();
    for member in &graph.members {
        let allowed = arrows.get(member.as_str()).unwrap_or_else(|| panic!("{member} has no line in ARROWS"));
        for need in graph.normal[member].iter().filter(|need| graph.members.contains(*need)) {
            assert!(allowed.contains(&need.as_str()), "{member} must not depend on {need}");
        }
    }
    assert_eq!(graph.members.len(), ARROWS.len(), "a line in ARROWS has no crate");
}

/// Crates that nearly every crate above them uses: their READMEs say so in these words.
const USED_BY_ALL: &[&str] = &["cowshed-types", "cowshed-layout", "cowshed-storage", "cowshed-image"];

/// Crates for development, which may use all others.
const FOR_DEVELOPMENT: &[&str] = &["cowshed-testkit", "cowshed-bench"];

#[test]
fn the_readme_of_a_crate_names_its_users() {
    let crates = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut missing = Vec::new();
    for (name, _) in ARROWS.iter().filter(|(name, _)| !USED_BY_ALL.contains(name)) {
        let readme = crates.join(name.trim_start_matches("cowshed-")).join("README.md");
        let text = std::fs::read_to_string(&readme).expect("a crate has a README");
        let first = text.split("\n\n").nth(1).expect("a paragraph follows the title");
        let users = ARROWS.iter().filter(|(user, needs)| needs.contains(name) && !FOR_DEVELOPMENT.contains(user));
        for (user, _) in users {
            let is_named = match *user {
                "cowshed" => first.contains("tool") || first.contains("verb"),
                "cowshed-daemon" => first.contains("daemon"),
                other => first.contains(&format!("`{}`", other.trim_start_matches("cowshed-"))),
            };
            if !is_named {
                missing.push(format!("{} doesn't name {user}", readme.display()));
            }
        }
    }
    assert!(missing.is_empty(), "users that the first paragraph lacks:\n  {}", missing.join("\n  "));
}

#[test]
fn the_pure_crates_reach_no_runtime() {
    let graph = graph();
    for pure in PURE {
        let found: Vec<String> = reached(&graph, pure).into_iter().filter(|p| RUNTIMES.contains(&p.as_str())).collect();
        assert!(found.is_empty(), "{pure} reaches {found:?}");
    }
    assert!(reached(&graph, "cowshed-storage").contains("io-uring"), "the test doesn't see dependencies at all");
}

#[test]
fn no_product_reaches_the_simulator() {
    let graph = graph();
    for product in ["cowshed", "cowshed-daemon"] {
        let reached = reached(&graph, product);
        assert!(reached.contains("cowshed-storage"), "{product}: the test sees no dependencies");
        for tests_only in ["cowshed-simulator", "cowshed-testbase", "cowshed-testkit"] {
            assert!(!reached.contains(tests_only), "{product} reaches {tests_only}");
        }
    }
}

#[test]
fn the_pure_crates_name_no_system_module() {
    for pure in PURE {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(&pure["cowshed-".len()..]);
        let sources = rust_files(&folder.join("src"));
        assert!(!sources.is_empty(), "no sources in {}", folder.display());
        for path in sources.into_iter().filter(|path| !path.ends_with(SWITCHES)) {
            let text = std::fs::read_to_string(&path).expect("a source file is readable");
            let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
            for module in SYSTEM_MODULES {
                // `std::io::Error` is a value that errors are made from, not a way to do I/O.
                let uses = code.matches(module).count()
                    - code.matches("std::io::Error").count() * usize::from(*module == "std::io");
                assert_eq!(uses, 0, "{} names {module}", path.display());
            }
        }
    }
}

#[test]
fn the_switches_of_mutants_are_no_part_of_the_product() {
    let block = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../types/src/lib.rs");
    let text = std::fs::read_to_string(block).expect("a source file is readable");
    assert!(
        text.contains("#[cfg(any(mutants, ablation))]\n#[doc(hidden)]\npub mod switches;"),
        "{SWITCHES} has no condition"
    );
}

/// Crates that may name `cowshed-formats`: all others name a format's own parts by `cowshed-image`, or none.
const ABOVE_FORMATS: &[&str] = &["cowshed-image"];

#[test]
fn only_the_table_names_the_formats() {
    let graph = graph();
    let above: Vec<&str> = graph
        .members
        .iter()
        .filter(|member| graph.normal[*member].contains("cowshed-formats"))
        .map(String::as_str)
        .collect();
    assert_eq!(above, ABOVE_FORMATS);
    for format in ["cowshed-formats", "cowshed-qcow2", "cowshed-offline"] {
        assert!(!reached(&graph, "cowshed-graph").contains(format), "the graph reaches {format}");
    }
}

/// Lines of a crate's `src/` that need no reason.
const MOST_LINES: usize = 15_000;

#[test]
fn large_crates_have_a_reason_in_the_map() {
    let crates = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let map = std::fs::read_to_string(crates.join("../ARCHITECTURE.md")).expect("the map");
    let mut large = 0;
    for entry in std::fs::read_dir(&crates).expect("the crates") {
        let path = entry.expect("a folder").path();
        let lines_of = |file| std::fs::read_to_string(file).expect("a source file is readable").lines().count();
        let lines: usize = rust_files(&path.join("src")).iter().map(lines_of).sum();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        let has_reason = map.contains(&format!("\n  - `{name}`: "));
        assert_eq!(
            lines > MOST_LINES,
            has_reason,
            "{name} has {lines} lines: split it, or give (or strike) the reason"
        );
        large += usize::from(has_reason);
    }
    assert!(large > 0, "the test sees no reasons");
}

#[test]
fn only_the_folder_of_a_format_knows_its_driver() {
    let crates = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for name in ["cowshed", "create", "daemon", "formats", "graph", "jobs", "nbd-server", "ova", "rescue"] {
        let sources = rust_files(&crates.join(name).join("src"));
        assert!(!sources.is_empty(), "no sources of {name}");
        for path in sources.iter().filter(|path| !path.to_string_lossy().contains("formats/src/qcow2/")) {
            let text = std::fs::read_to_string(path).expect("a source file is readable");
            // A capability is to be asked for: see `graph/src/node/capabilities.rs`.
            for format in ["qcow2", "luks"] {
                assert!(!text.contains(&format!(".{format}()")), "{} asks for the driver of {format}", path.display());
            }
        }
    }
}

pub(super) fn rust_files(folder: &std::path::Path) -> Vec<std::path::PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a source folder is readable") {
        let path = entry.expect("a folder entry is readable").path();
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}

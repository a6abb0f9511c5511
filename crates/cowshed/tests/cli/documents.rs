// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Completions, manual pages, help, and COMPAT.md, which must name every option.

use std::process::Command;

fn cowshed(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_cowshed")).args(arguments).output().expect("our own binary runs");
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).expect("text")
}

const VERBS: [&str; 16] = [
    "create", "info", "map", "check", "compare", "convert", "measure", "resize", "snapshot", "commit", "rebase",
    "amend", "bitmap", "dd", "bench", "io",
];
const VERBS_OF_QEMU_IMG: &[&str] = VERBS.split_at(15).0;

/// The options that a help text lists, short and long.
fn options(help: &str) -> Vec<String> {
    let lines = help.lines().map(str::trim_start).filter(|line| line.starts_with('-'));
    lines
        .flat_map(|line| line.split("  ").next().unwrap_or_default().split(", "))
        .map(|option| option.split([' ', '=']).next().unwrap_or_default())
        // Those that may be given again.
        .map(|option| option.trim_end_matches("...").to_owned())
        .filter(|option| option.len() > 1 && option.starts_with('-') && !option.ends_with(')'))
        .collect()
}

#[test]
fn compat_names_every_option() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../COMPAT.md");
    let page = std::fs::read_to_string(path).expect("COMPAT.md");
    for verb in VERBS {
        let section = page.split(&format!("\n## {verb}\n")).nth(1).unwrap_or_else(|| panic!("no section {verb}"));
        let section = section.split("\n## ").next().unwrap_or_default();
        let options = options(&cowshed(&["help", verb]));
        assert!(options.len() > 3, "{verb}: {options:?}");
        for option in options.iter().filter(|option| !["-h", "--help"].contains(&option.as_str())) {
            assert!(section.contains(&format!("`{option}`")), "COMPAT.md, {verb}: no row for {option}");
        }
    }
}

/// Programs of QEMU whose command lines we have.
#[test]
fn compat_names_every_option_of_the_tools() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../COMPAT.md");
    let page = std::fs::read_to_string(path).expect("COMPAT.md");
    for tool in ["qemu-nbd", "qemu-storage-daemon"] {
        let section = page.split(&format!("\n## {tool}\n")).nth(1).unwrap_or_else(|| panic!("no section {tool}"));
        let section = section.split("\n## ").next().unwrap_or_default();
        let options = options(&cowshed(&[tool, "--help"]));
        assert!(options.len() > 5, "{tool}: {options:?}");
        for option in options.iter().filter(|option| !["-h", "--help", "-V", "--version"].contains(&option.as_str())) {
            assert!(section.contains(&format!("`{option}`")), "COMPAT.md, {tool}: no row for {option}");
        }
    }
}

#[test]
fn completions_know_the_verbs() {
    for shell in ["bash", "zsh", "fish"] {
        let script = cowshed(&["completions", shell]);
        for verb in VERBS {
            assert!(script.contains(verb), "{shell}: {verb}");
        }
    }
}

#[test]
fn manual_pages_are_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path().join("man1");
    cowshed(&["man", "--dir", dir.to_str().expect("text")]);
    for verb in VERBS {
        let page = std::fs::read_to_string(dir.join(format!("cowshed-{verb}.1"))).expect("a page");
        assert!(page.contains(".TH") && page.contains(".SH EXAMPLES\n.nf\n"), "{verb}: {page}");
    }
    let page = std::fs::read_to_string(dir.join("cowshed-create.1")).expect("a page");
    let command =
        "\n  cowshed create \\-f qcow2 \\-o cluster_size=128k,extended_l2=on,preallocation=metadata disk.qcow2 1T\n";
    assert!(page.contains(command), "{page}");
    assert!(dir.join("cowshed.1").is_file());
}

/// The commands that `cowshed --help` lists.
fn listed() -> Vec<String> {
    let help = cowshed(&["--help"]);
    let commands = help.split("Commands:\n").nth(1).expect("a list").split("\n\n").next().unwrap_or_default();
    let names = commands.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    names.filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

#[test]
fn compat_lists_every_verb_of_our_own() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../COMPAT.md");
    let page = std::fs::read_to_string(path).expect("COMPAT.md");
    let list = page.split("\nCommands that qemu-img doesn't have:").nth(1).expect("the list");
    let list = list.split("\n\n").next().unwrap_or_default();
    let ours: Vec<String> = listed().into_iter().filter(|verb| !VERBS_OF_QEMU_IMG.contains(&verb.as_str())).collect();
    assert!(ours.len() > 8, "{ours:?}");
    for verb in ours {
        assert!(list.contains(&format!("`{verb}`")), "COMPAT.md lacks {verb}");
    }
}

/// A line that is too long for help is folded, and its second half would be a command of its own.
#[test]
fn examples_can_be_copied_line_by_line() {
    let mut verbs: Vec<Vec<String>> = listed().into_iter().map(|verb| vec![verb]).collect();
    verbs.extend(VERBS_OF_QEMU_IMG.iter().map(|verb| vec!["img".to_owned(), (*verb).to_owned()]));
    verbs.extend(["qemu-nbd", "qemu-storage-daemon"].map(|tool| vec![tool.to_owned()]));
    for verb in verbs {
        let arguments: Vec<&str> = verb.iter().map(String::as_str).chain(["--help"]).collect();
        let help = cowshed(&arguments);
        let examples = help.split("\nExamples:\n").nth(1).unwrap_or_else(|| panic!("{verb:?} has no examples"));
        for line in examples.lines().filter(|line| !line.is_empty()) {
            let command = line.strip_prefix("  ").filter(|rest| !rest.starts_with(' '));
            let is_command =
                command.is_some_and(|line| ["cowshed ", "qemu-", "curl "].iter().any(|name| line.contains(name)));
            assert!(is_command || line.starts_with("      "), "{verb:?}: {line}");
        }
    }
}

#[test]
fn help_by_either_name() {
    assert!(cowshed(&["--help"]).contains("Usage: cowshed"));
    assert!(cowshed(&["convert", "--help"]).contains("cowshed convert -p -O qcow2"));
    assert!(cowshed(&["img", "convert", "--help"]).contains("qemu-img convert -p -O qcow2"));
    let version = cowshed(&["img", "--version"]);
    assert!(version.starts_with("qemu-img version 11."), "{version}");
}

/// The shell blocks of a page, one script. `language`: the word behind their fence.
fn shell_of(page: &str, language: &str) -> String {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(page);
    let text = std::fs::read_to_string(path).expect("the page is there");
    let fence = format!("```{language}\n");
    let blocks = text.split(&fence).skip(1).map(|block| block.split("```").next().unwrap_or_default());
    blocks.collect()
}

/// Runs a script in a folder of its own, and returns its output.
fn run_script(script: &str) -> String {
    const MOST_SECONDS: &str = "300";
    let folder = tempfile::tempdir().expect("a folder, and a short path for its sockets");
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_cowshed"));
    let path = std::env::var("PATH").expect("PATH");
    let path = format!("{}:{path}", program.parent().expect("its folder").display());
    let output = Command::new("timeout")
        .args([MOST_SECONDS, "sh", "-eux", "-c", script])
        .current_dir(&folder)
        .env("PATH", path)
        .output()
        .expect("a shell");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}\n{said}{}", output.status, String::from_utf8_lossy(&output.stderr));
    said
}

#[test]
fn the_tutorial_works_as_it_is_written() {
    let script = shell_of("tutorial.md", "sh");
    assert!(script.lines().count() > 30, "{script}");
    run_script(&script);
}

#[test]
fn a_database_meets_a_failing_disk_as_it_is_written() {
    let script = shell_of("fault-injection.md", "sh");
    let said = run_script(&script);
    let reactions: Vec<&str> = said.lines().filter(|line| line.starts_with("reaction ")).collect();
    let expected = [
        "reaction 1: the transaction fails, and is rolled back",
        "reaction 2: the check finds the noise",
        "reaction 3: the change is believed, and gone",
        "reaction 4: it waits",
    ];
    assert_eq!(reactions, expected, "{said}");
}

#[test]
#[ignore = "needs root and loop devices"]
fn ext4_meets_a_failing_disk_as_it_is_written() {
    let said = run_script(&shell_of("fault-injection.md", "bash"));
    let reactions: Vec<&str> = said.lines().filter(|line| line.starts_with("reaction ")).collect();
    assert_eq!(reactions, ["reaction 1: the sync fails", "reaction 2: the file system is read-only"], "{said}");
}

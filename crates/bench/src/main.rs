// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Measurements side by side with qemu-img, as a markdown table.
//!
//! `cargo run --release -p cowshed-bench -- [OPTION]... CASE...`, see [`USAGE`].

mod bare;
mod bare_vhost;
mod cases;
mod copies;
mod driver;
mod exports;
mod fixture;
mod formats;
mod large;
mod luks;
mod means;
mod measure;
mod memory;
mod nbd;
mod opening;
mod options;
mod plots;
mod queues;
mod random_io;
mod reads;
mod snapshots;
mod table;
mod vhost;
mod writes;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

const USAGE: &str = "\
usage: cowshed-bench [OPTION]... CASE...|all|list

  --cowshed PATH   our tool (default: the `cowshed` beside this program)
  --without PATH   our tool with switches, of `scripts/without`, for the case `means`
                   (default: target/ablation-build/TRIPLE/release/cowshed)
  --qemu PATH      qemu-img to compare with (default: $COWSHED_BENCH_QEMU, the newest one of
                   ~/.cache/qemu-peers/bin, else qemu-img in PATH)
  --dir FOLDER     where the images go; on a disk, not tmpfs (default: target/bench beside this program)
  --rounds N       rounds; each runs both sides, in turns first (default 5)
  --seconds N      length of a run under load (default 3)
  --only TEXT      of the loads of NBD servers, of `means` and of `options`, those with TEXT in their name
  --plots FOLDER   draws each case as FOLDER/CASE.svg
  --size-mib N     virtual size of the images to convert (default 4096, half of it data)

Build the tool first: cargo build --release -p cowshed";

/// The settings from the command line.
#[derive(Clone)]
pub struct Settings {
    /// Our tool.
    pub cowshed: PathBuf,
    /// Our tool with switches for its optimisations.
    pub without: PathBuf,
    /// The other one.
    pub qemu: PathBuf,
    /// Folder of the images.
    pub folder: PathBuf,
    /// Rounds of each case.
    pub rounds: usize,
    /// Length of a run under load, in seconds.
    pub seconds: u64,
    /// A part of the names of the loads to run.
    pub only: Option<String>,
    /// The folder of the drawings.
    pub plots: Option<PathBuf>,
    /// Virtual size of the images to convert, in MiB.
    pub size_mib: u64,
}

fn main() -> ExitCode {
    match run(std::env::args().skip(1).collect()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("cowshed-bench: {message}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Vec<String>) -> Result<(), String> {
    if let [option, mib] = arguments.as_slice()
        && option == memory::TOUCH
    {
        return memory::touch(mib);
    }
    if let [option, socket, files @ ..] = arguments.as_slice()
        && option == bare::SERVE
    {
        return bare::serve(socket, files);
    }
    if let [option, socket, file, how @ ..] = arguments.as_slice()
        && option == bare_vhost::SERVE
    {
        return bare_vhost::serve(socket, file, !how.is_empty());
    }
    let (mut settings, names) = parse(arguments)?;
    if names.iter().any(|name| name == "list") {
        cases::CASES.iter().for_each(|case| println!("{:24} {}", case.name, case.about));
        return Ok(());
    }
    let all = names.iter().any(|name| name == "all");
    let unknown = names.iter().find(|name| *name != "all" && !cases::CASES.iter().any(|case| case.name == **name));
    if let Some(name) = unknown {
        return Err(format!("no case is named {name} (see `list`)"));
    }
    if names.is_empty() {
        return Err(USAGE.into());
    }
    let fail = |e: std::io::Error| format!("{}: {e}", settings.folder.display());
    std::fs::create_dir_all(&settings.folder).map_err(fail)?;
    // The name of a backing file is looked up from where its overlay is.
    settings.folder = settings.folder.canonicalize().map_err(fail)?;
    let (mut rows, mut failed) = (Vec::new(), None);
    for case in cases::CASES.iter().filter(|case| all || names.iter().any(|name| name == case.name)) {
        eprintln!("{}: {}", case.name, case.about);
        // Earlier measurements are printed all the same.
        match (case.run)(&settings) {
            Ok(more) => {
                if let Some(folder) = &settings.plots {
                    plots::write(folder, case.name, &more)?;
                }
                let broken = more.iter().find(|row| matches!(row.result, table::Outcome::Failed(_)));
                failed = failed.or(broken.map(|row| format!("{}: not all could be measured", row.name)));
                rows.extend(more);
            }
            Err(error) => failed = failed.or(Some(format!("{}: {error}", case.name))),
        }
    }
    println!("{}", table::render(&settings, &rows));
    match failed {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

fn parse(arguments: Vec<String>) -> Result<(Settings, Vec<String>), String> {
    let executable = std::env::current_exe().map_err(|e| e.to_string())?;
    let beside = executable.parent().map(PathBuf::from).unwrap_or_default();
    // target/TRIPLE/release
    let triple = beside.parent().and_then(Path::file_name).unwrap_or_default();
    let target = beside.ancestors().nth(2).map(PathBuf::from).unwrap_or_default();
    let mut settings = Settings {
        cowshed: beside.join("cowshed"),
        without: target.join("ablation-build").join(triple).join("release/cowshed"),
        qemu: newest_qemu(),
        folder: target.join("bench"),
        rounds: 5,
        seconds: 3,
        only: None,
        plots: None,
        size_mib: 4096,
    };
    let (mut names, mut arguments) = (Vec::new(), arguments.into_iter());
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value"));
        let number = |text: String| text.parse::<u64>().map_err(|_| format!("{text} is no number"));
        match argument.as_str() {
            "--cowshed" => settings.cowshed = value()?.into(),
            "--without" => settings.without = value()?.into(),
            "--qemu" => settings.qemu = value()?.into(),
            "--dir" => settings.folder = value()?.into(),
            "--rounds" => settings.rounds = number(value()?)?.max(1) as usize,
            "--seconds" => settings.seconds = number(value()?)?.max(1),
            "--only" => settings.only = Some(value()?),
            "--plots" => settings.plots = Some(value()?.into()),
            "--size-mib" => settings.size_mib = number(value()?)?.max(64),
            "-h" | "--help" => return Err(USAGE.into()),
            option if option.starts_with('-') => return Err(format!("unknown option {option}\n{USAGE}")),
            name => names.push(name.to_owned()),
        }
    }
    // A server's socket must be named from the root on.
    settings.folder = std::path::absolute(&settings.folder).map_err(|e| e.to_string())?;
    Ok((settings, names))
}

fn newest_qemu() -> PathBuf {
    if let Some(path) = std::env::var_os("COWSHED_BENCH_QEMU") {
        return path.into();
    }
    let peers = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache/qemu-peers/bin/qemu-img"));
    peers.filter(|path| path.exists()).unwrap_or_else(|| "qemu-img".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The settings of an empty command line.
    pub fn settings() -> Settings {
        parse(Vec::new()).expect("the defaults").0
    }
}

// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The real QEMU tools as oracle: `qemu-img` and `qemu-io`, observed from outside. Two sets of them: the system's, and the
//! newest that Debian has, which `scripts/peers` fetches.

pub use cowshed_testbase::temp_dir;
use serde_json::Value;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A set of QEMU tools of one version.
#[derive(Clone, Debug)]
pub struct Qemu {
    img: PathBuf,
    io: PathBuf,
    /// The folder of the other tools of the set; `None` for `PATH`.
    folder: Option<PathBuf>,
}

/// The result of a run of a tool.
#[derive(Clone, Debug)]
pub struct Output {
    /// Exit code; -1 when a signal ended it.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// The command line, for messages.
    pub command: String,
}

impl Output {
    /// Panics with the tool's whole output unless it exited with 0.
    #[track_caller]
    pub fn expect_ok(self) -> Self {
        assert_eq!(self.code, 0, "`{}` failed\n{}{}", self.command, self.stdout, self.stderr);
        self
    }

    /// Standard output as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| {
            panic!("`{}` printed no JSON: {error}\n{}{}", self.command, self.stdout, self.stderr)
        })
    }
}

/// The verdict of `qemu-img check`.
#[derive(Clone, Debug)]
pub struct CheckVerdict {
    /// 0 clean, 1 could not check, 2 corruptions, 3 leaks only.
    pub code: i32,
    /// Corruptions found.
    pub corruptions: u64,
    /// Leaked clusters found.
    pub leaks: u64,
    /// The whole JSON object, `Null` when the tool gave none.
    pub json: Value,
    /// Its standard error.
    pub stderr: String,
}

/// One entry of `qemu-img map --output=json`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapEntry {
    /// First guest byte.
    pub start: u64,
    /// Length in bytes.
    pub length: u64,
    /// Layers down the backing chain.
    pub depth: u64,
    /// Allocated in the layer `depth`.
    pub present: bool,
    /// Reads as zeroes.
    pub zero: bool,
    /// May hold data.
    pub data: bool,
    /// Stored compressed; `None` from tools that don't report it (before QEMU 8.2).
    pub compressed: Option<bool>,
    /// Offset in the layer's file, when its bytes are the data.
    pub offset: Option<u64>,
}

impl MapEntry {
    /// True when `next` goes on where `self` ends with the same properties, so that the two are one run.
    pub fn continues_with(&self, next: &MapEntry) -> bool {
        let host_continues = match (self.offset, next.offset) {
            (Some(host), Some(next_host)) => host + self.length == next_host,
            (None, None) => true,
            _ => false,
        };
        self.start + self.length == next.start
            && (self.depth, self.present, self.zero, self.data, self.compressed)
                == (next.depth, next.present, next.zero, next.data, next.compressed)
            && host_continues
    }
}

/// Joins entries that continue each other: tools may cut one run in several entries.
pub fn coalesce(entries: impl IntoIterator<Item = MapEntry>) -> Vec<MapEntry> {
    let mut runs: Vec<MapEntry> = Vec::new();
    for entry in entries {
        match runs.last_mut() {
            Some(last) if last.continues_with(&entry) => last.length += entry.length,
            _ => runs.push(entry),
        }
    }
    runs
}

impl Qemu {
    /// The tools named by `COWSHED_QEMU_IMG` and `COWSHED_QEMU_IO`, else those in `PATH`.
    ///
    /// Panics when there are none, with the way to install them: a differential test without its oracle proves nothing
    /// and must not pass.
    pub fn system() -> Self {
        let find = |variable: &str, tool: &str| {
            if let Some(path) = std::env::var_os(variable) {
                return PathBuf::from(path);
            }
            find_in_path(tool).unwrap_or_else(|| {
                panic!("{tool} is not in PATH; install it (Debian: apt-get install qemu-utils) or set {variable}")
            })
        };
        Qemu { img: find("COWSHED_QEMU_IMG", "qemu-img"), io: find("COWSHED_QEMU_IO", "qemu-io"), folder: None }
    }

    /// The newest tools, of [`peers_dir`].
    pub fn newest() -> Self {
        let folder = peers_dir();
        Qemu { img: folder.join("qemu-img"), io: folder.join("qemu-io"), folder: Some(folder) }
    }

    /// The system's tools and the newest ones.
    pub fn all() -> [Qemu; 2] {
        [Self::system(), Self::newest()]
    }

    /// The tools that a seeded test takes for this seed: the system's for even ones, the newest for odd ones.
    pub fn for_seed(seed: u64) -> Self {
        if seed.is_multiple_of(2) { Self::system() } else { Self::newest() }
    }

    /// A tool of the set, such as `qemu-nbd`.
    pub fn program(&self, tool: &str) -> PathBuf {
        match &self.folder {
            Some(folder) => folder.join(tool),
            None => {
                find_in_path(tool).unwrap_or_else(|| panic!("{tool} is not in PATH: scripts/setup test installs it"))
            }
        }
    }

    /// The path of `qemu-img`.
    pub fn img_path(&self) -> &Path {
        &self.img
    }

    /// The path of `qemu-io`.
    pub fn io_path(&self) -> &Path {
        &self.io
    }

    /// Runs `qemu-img` with arguments.
    pub fn img<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Output {
        let mut command = Command::new(&self.img);
        command.args(arguments);
        // QEMU measures the time of a guess of a passphrase, and stops where the system's clock of CPU time stood
        // still.
        let mut tries = 20;
        loop {
            let output = run(&mut command);
            tries -= 1;
            if output.code == 0 || tries == 0 || !output.stderr.contains("Unable to get accurate CPU usage") {
                return output;
            }
        }
    }

    /// Runs `qemu-io` with arguments.
    pub fn io<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Output {
        run(Command::new(&self.io).args(arguments))
    }

    /// (major, minor) version of `qemu-img`.
    pub fn version(&self) -> (u32, u32) {
        let text = self.img(["--version"]).expect_ok().stdout;
        let digits = text.split_whitespace().find(|word| word.starts_with(|c: char| c.is_ascii_digit()));
        let mut numbers = digits.unwrap_or("0.0").split('.').map(|part| part.parse().unwrap_or(0));
        (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
    }

    /// `qemu-img create -f FORMAT -o OPTIONS PATH SIZE`; `options` may be empty.
    #[track_caller]
    pub fn create(&self, path: &Path, format: &str, options: &str, size: u64) {
        let size = size.to_string();
        let mut arguments: Vec<&OsStr> = vec!["create".as_ref(), "-q".as_ref(), "-f".as_ref(), format.as_ref()];
        if !options.is_empty() {
            arguments.extend::<[&OsStr; 2]>(["-o".as_ref(), options.as_ref()]);
        }
        arguments.extend([path.as_os_str(), size.as_ref()]);
        self.img(arguments).expect_ok();
    }

    /// `qemu-img convert` between two files with their formats and further options.
    #[track_caller]
    pub fn convert(&self, source: (&Path, &str), target: (&Path, &str), options: &[&str]) {
        let mut arguments: Vec<&OsStr> = vec!["convert".as_ref()];
        arguments.extend(options.iter().map(OsStr::new));
        arguments.extend::<[&OsStr; 6]>([
            "-f".as_ref(),
            source.1.as_ref(),
            "-O".as_ref(),
            target.1.as_ref(),
            source.0.as_os_str(),
            target.0.as_os_str(),
        ]);
        self.img(arguments).expect_ok();
    }

    /// The guest's view of an image, all of its bytes, by `qemu-img convert -O raw`.
    #[track_caller]
    pub fn content(&self, path: &Path, format: &str) -> Vec<u8> {
        let raw = path.with_extension("content");
        self.convert((path, format), (&raw, "raw"), &[]);
        let bytes = std::fs::read(&raw).expect("the raw file just written is readable");
        std::fs::remove_file(&raw).expect("the raw file just written can be removed");
        bytes
    }

    /// `qemu-img check --output=json`.
    pub fn check(&self, path: &Path, format: &str) -> CheckVerdict {
        self.check_with(path, format, &[])
    }

    /// [`Qemu::check`] with further options, such as `-r all`.
    pub fn check_with(&self, path: &Path, format: &str, options: &[&str]) -> CheckVerdict {
        let mut arguments: Vec<&OsStr> = ["check", "--output=json", "-f", format].into_iter().map(OsStr::new).collect();
        arguments.extend(options.iter().map(OsStr::new));
        arguments.push(path.as_os_str());
        let output = self.img(arguments);
        let json: Value = serde_json::from_str(&output.stdout).unwrap_or_default();
        let count = |key: &str| json.get(key).and_then(Value::as_u64).unwrap_or(0);
        CheckVerdict {
            code: output.code,
            corruptions: count("corruptions"),
            leaks: count("leaks"),
            stderr: output.stderr,
            json,
        }
    }

    /// Panics unless `qemu-img check` finds neither corruptions nor leaks.
    #[track_caller]
    pub fn expect_clean(&self, path: &Path) {
        let verdict = self.check(path, "qcow2");
        assert_eq!(verdict.code, 0, "qemu-img check {}: {}\n{}", path.display(), verdict.json, verdict.stderr);
    }

    /// Panics unless `qemu-img check` finds nothing but leaks.
    #[track_caller]
    pub fn expect_no_corruption(&self, path: &Path) {
        let verdict = self.check(path, "qcow2");
        let is_well = matches!(verdict.code, 0 | 3) && verdict.corruptions == 0;
        assert!(is_well, "qemu-img check {}: {}\n{}", path.display(), verdict.json, verdict.stderr);
    }

    /// `qemu-img compare`: true for equal content. Panics when it can't compare.
    #[track_caller]
    pub fn is_equal(&self, left: (&Path, &str), right: (&Path, &str)) -> bool {
        let arguments: [&OsStr; 7] = [
            "compare".as_ref(),
            "-f".as_ref(),
            left.1.as_ref(),
            "-F".as_ref(),
            right.1.as_ref(),
            left.0.as_os_str(),
            right.0.as_os_str(),
        ];
        let output = self.img(arguments);
        assert!(output.code <= 1, "`{}` failed\n{}{}", output.command, output.stdout, output.stderr);
        output.code == 0
    }

    /// `qemu-img map --output=json`, as runs.
    #[track_caller]
    pub fn map(&self, path: &Path, format: &str) -> Vec<MapEntry> {
        let arguments: [&OsStr; 5] =
            ["map".as_ref(), "--output=json".as_ref(), "-f".as_ref(), format.as_ref(), path.as_os_str()];
        let entries = self.img(arguments).expect_ok().json();
        coalesce(entries.as_array().expect("map prints an array").iter().map(|entry| {
            let number = |key: &str| entry.get(key).and_then(Value::as_u64);
            let flag = |key: &str| entry.get(key).and_then(Value::as_bool);
            MapEntry {
                start: number("start").expect("start"),
                length: number("length").expect("length"),
                depth: number("depth").expect("depth"),
                // Before QEMU 6.1 `present` was not there: everything listed was present.
                present: flag("present").unwrap_or(true),
                zero: flag("zero").expect("zero"),
                data: flag("data").expect("data"),
                compressed: flag("compressed"),
                offset: number("offset"),
            }
        }))
    }

    /// `qemu-img info --output=json`.
    #[track_caller]
    pub fn info(&self, path: &Path, format: &str) -> Value {
        let arguments: [&OsStr; 5] =
            ["info".as_ref(), "--output=json".as_ref(), "-f".as_ref(), format.as_ref(), path.as_os_str()];
        self.img(arguments).expect_ok().json()
    }

    /// Runs a batch of `qemu-io` commands in one process on one image, discards passed on as `unmap`.
    ///
    /// qemu-io goes on after a failed command and exits with 1 at the end; this panics then.
    #[track_caller]
    pub fn io_commands(&self, path: &Path, format: &str, commands: &[String]) -> Output {
        let mut process = Command::new(&self.io);
        process.args(["-f", format, "-d", "unmap"]);
        for command in commands {
            process.args(["-c", command]);
        }
        process.arg(path);
        let output = run(&mut process).expect_ok();
        // Some failures are only reported in words.
        let failed = output.stdout.lines().find(|line| line.contains("failed"));
        assert!(failed.is_none(), "`{}`: {}", output.command, failed.unwrap_or_default());
        output
    }
}

/// The folder that `scripts/peers` has filled with the newest QEMU tools, `nbdcopy`, `nbdinfo` and `nbdpython`.
///
/// Panics when it is not complete: a test without its peer proves nothing.
pub fn peers_dir() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/peers");
    assert!(folder.join("complete").exists(), "{} is not complete: scripts/setup test fills it", folder.display());
    folder.canonicalize().expect("a folder with a file in it").join("bin")
}

fn find_in_path(tool: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(tool)).find(|candidate| candidate.is_file())
}

fn run(command: &mut Command) -> Output {
    let text = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy().into_owned())
        .collect::<Vec<_>>()
        .join(" ");
    let output = command
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("could not run `{text}`: {error}"));
    Output {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        command: text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fresh_image_is_clean_empty_and_unmapped() {
        let (qemu, folder) = (Qemu::system(), temp_dir());
        let image = folder.path().join("a.qcow2");
        qemu.create(&image, "qcow2", "cluster_size=4k", 1 << 20);
        qemu.expect_clean(&image);
        assert_eq!(qemu.content(&image, "qcow2"), vec![0; 1 << 20]);
        let map = qemu.map(&image, "qcow2");
        assert_eq!(map.len(), 1);
        assert!(map[0].zero && !map[0].data && map[0].offset.is_none());
        assert_eq!(qemu.info(&image, "qcow2")["virtual-size"], 1 << 20);
    }

    #[test]
    #[should_panic(expected = "failed")]
    fn a_failed_io_command_is_noticed() {
        let (qemu, folder) = (Qemu::system(), temp_dir());
        let image = folder.path().join("a.qcow2");
        qemu.create(&image, "qcow2", "", 1 << 20);
        qemu.io_commands(&image, "qcow2", &["read 2M 512".into()]);
    }
}

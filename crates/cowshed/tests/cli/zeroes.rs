// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Zeroes that are written, detected or copied, beside both versions of QEMU: the same content, and the same clusters allocated.

use cowshed_testkit::qemu::{Qemu, temp_dir};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Options of the image, and its backing file.
const IMAGES: &[(&str, &str)] = &[
    ("data_file=DATA", ""),
    ("data_file=DATA,data_file_raw=on", ""),
    ("data_file=DATA,extended_l2=on", ""),
    ("data_file=DATA,data_file_raw=on,extended_l2=on", ""),
    ("data_file=DATA,preallocation=metadata", ""),
    ("data_file=DATA,data_file_raw=on,preallocation=metadata", ""),
    ("data_file=DATA", "short"),
    ("preallocation=metadata", ""),
    ("preallocation=metadata,extended_l2=on", "short"),
    ("preallocation=metadata,compat=0.10", ""),
    ("preallocation=falloc", ""),
    ("preallocation=full", ""),
    ("compat=1.1", "short"),
    ("compat=0.10", "short"),
    ("extended_l2=on", "short"),
    ("compat=1.1", "short.raw"),
];

/// Options of the node, and requests.
const REQUESTS: &[(&str, &[&str])] = &[
    ("", &["write -z 0 1M", "write -z -u 2M 64k"]),
    ("", &["write -P 5 0 128k", "write -z -u 0 64k", "write -P 5 2M 128k", "write -z 2M 64k"]),
    // At the end of the backing file and behind it.
    ("", &["write -z 960k 128k", "write -z -u 1100k 100k", "write -z 3M 3k"]),
    ("", &["write -z -u 960k 128k", "write -P 5 2M 64k", "write -z -u 2052k 4k"]),
    ("", &["write -P 5 0 128k", "discard 0 64k", "write -z 2M 128k", "discard 2M 64k"]),
    ("detect-zeroes=on", &["write -P 0 0 128k", "write -P 5 2M 128k", "write -P 0 2M 64k", "write -P 0 2180k 4k"]),
    ("detect-zeroes=unmap", &["write -P 0 960k 128k", "write -P 5 2M 128k", "write -P 0 2M 64k", "write -P 0 3M 2k"]),
];

/// Start, depth, whether it is allocated, whether it is zeroes without data.
type Run = (u64, u64, bool, bool);

/// The guest's data, its runs, and the bytes of a data file.
type Answer = (Vec<u8>, Vec<Run>, Option<Vec<u8>>);

/// Tools of one kind in a folder, with images of its own.
struct Side {
    folder: PathBuf,
    img: PathBuf,
    io: PathBuf,
}

impl Side {
    fn run(&self, tool: &Path, arguments: &[&str]) {
        let output = Command::new(tool).args(arguments).current_dir(&self.folder).env("LC_ALL", "C").output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let said = text(&output.stdout) + &text(&output.stderr);
        assert!(output.status.success() && !said.contains("failed"), "{tool:?} {arguments:?}: {said}");
    }

    fn img(&self, line: &str) {
        self.run(&self.img, &line.split(' ').filter(|word| !word.is_empty()).collect::<Vec<_>>());
    }

    fn io(&self, options: &str, image: &str, requests: &[&str]) {
        let node = format!("driver=qcow2,discard=unmap,file.driver=file,file.filename={image},{options}");
        let node = node.trim_end_matches(',');
        let mut arguments = vec!["--image-opts", node];
        requests.iter().for_each(|request| arguments.extend(["-c", request]));
        self.run(&self.io, &arguments);
    }

    /// The guest's data, its allocated clusters, and the contents of a raw data file.
    fn result(&self, judge: &Qemu, image: &str) -> Answer {
        let path = self.folder.join(image);
        assert_eq!(judge.check(&path, "qcow2").code, 0, "{image}");
        let mut runs: Vec<Run> = Vec::new();
        for run in judge.map(&path, "qcow2") {
            // Holes below data clusters are the file's business.
            let next = (run.start, run.depth, run.present, run.zero && !run.data);
            if runs.last().is_none_or(|last| (last.1, last.2, last.3) != (next.1, next.2, next.3)) {
                runs.push(next);
            }
        }
        (judge.content(&path, "qcow2"), runs, std::fs::read(self.folder.join("data")).ok())
    }
}

fn sides(folder: &Path) -> (Side, [Side; 2]) {
    let side = |name: &str, img: PathBuf, io: PathBuf| {
        let folder = folder.join(name);
        std::fs::create_dir(&folder).unwrap();
        Side { folder, img, io }
    };
    let link = |name: &str| {
        let path = folder.join(name);
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_cowshed"), &path).unwrap();
        path
    };
    let ours = side("ours", link("qemu-img"), link("qemu-io"));
    let mut number = 0;
    let theirs = Qemu::all().map(|qemu| {
        number += 1;
        side(&format!("theirs{number}"), qemu.img_path().to_owned(), qemu.io_path().to_owned())
    });
    (ours, theirs)
}

fn backing_files(qemu: &Qemu, folder: &Path) {
    qemu.create(&folder.join("short"), "qcow2", "", 1000 << 10);
    qemu.io_commands(&folder.join("short"), "qcow2", &["write -P 9 900k 100k".to_owned()]);
    qemu.convert((&folder.join("short"), "qcow2"), (&folder.join("short.raw"), "raw"), &[]);
}

fn backing_words(backing: &str) -> String {
    match backing {
        "" => String::new(),
        "short.raw" => "-b short.raw -F raw".to_owned(),
        name => format!("-b {name} -F qcow2"),
    }
}

#[test]
fn zero_writes_allocate_and_read_as_in_qemu() {
    let folder = temp_dir();
    let (ours, theirs) = sides(folder.path());
    let judge = Qemu::newest();
    for side in std::iter::once(&ours).chain(&theirs) {
        backing_files(&judge, &side.folder);
    }
    for (number, (options, backing)) in IMAGES.iter().enumerate() {
        for (turn, (node, requests)) in REQUESTS.iter().enumerate() {
            let mut answers = Vec::new();
            for side in [&ours, &theirs[(number + turn) % 2]] {
                let _ = std::fs::remove_file(side.folder.join("data"));
                let options = options.replace("DATA", &side.folder.join("data").display().to_string());
                let line = format!("create -q -f qcow2 -o {options} {} image 4M", backing_words(backing));
                // One maker, so that only the requests differ.
                let made = Command::new(judge.img_path())
                    .args(line.split(' ').filter(|word| !word.is_empty()))
                    .current_dir(&side.folder)
                    .status();
                assert!(made.is_ok_and(|status| status.success()), "{line}");
                side.io(node, "image", requests);
                answers.push(side.result(&judge, "image"));
            }
            let about = format!("{options} on '{backing}', {node} {requests:?}");
            assert!(answers[0].0 == answers[1].0, "{about}: other content");
            // A raw data file holds its zeroes itself; QEMU marks its clusters as zeroes besides, ours as data.
            match options.contains("data_file_raw") {
                true => assert!(answers[0].2 == answers[1].2, "{about}: other bytes in the raw data file"),
                false => assert_eq!(answers[0].1, answers[1].1, "{about}: allocation"),
            }
        }
    }
}

/// Commits, and copies into an image that is there, of zeroes over data and of zeroes over nothing.
#[test]
fn copied_zeroes_allocate_and_read_as_in_qemu() {
    let folder = temp_dir();
    let (ours, theirs) = sides(folder.path());
    let judge = Qemu::newest();
    let targets = [
        "compat=1.1",
        "compat=0.10",
        "extended_l2=on",
        "data_file=DATA",
        "data_file=DATA,data_file_raw=on",
        "preallocation=metadata",
    ];
    for (number, target) in targets.iter().enumerate() {
        for (turn, step) in
            ["commit", "commit -d", "convert -n", "convert -n -S 0", "convert -n --target-is-zero"].iter().enumerate()
        {
            let mut answers = Vec::new();
            for side in [&ours, &theirs[(number + turn) % 2]] {
                for name in ["data", "base", "top"] {
                    let _ = std::fs::remove_file(side.folder.join(name));
                }
                let make = |line: String| {
                    let made = Command::new(judge.img_path()).args(line.split(' ')).current_dir(&side.folder).status();
                    assert!(made.is_ok_and(|status| status.success()), "{line}");
                };
                let target = target.replace("DATA", &side.folder.join("data").display().to_string());
                make(format!("create -q -f qcow2 -o {target} base 4M"));
                if !step.contains("zero") {
                    judge.io_commands(&side.folder.join("base"), "qcow2", &["write -P 9 0 2M".to_owned()]);
                }
                let layered = step.starts_with("commit");
                make(format!("create -q -f qcow2 {}top 4M", if layered { "-b base -F qcow2 " } else { "" }));
                let zeroes = ["write -P 1 0 128k", "write -z 256k 256k", "write -z 600k 10k", "write -z 3M 64k"];
                judge.io_commands(&side.folder.join("top"), "qcow2", &zeroes.map(str::to_owned));
                match layered {
                    true => side.img(&format!("{step} -q -f qcow2 top")),
                    false => side.img(&format!("{step} -f qcow2 -O qcow2 top base")),
                }
                answers.push(side.result(&judge, "base"));
            }
            let about = format!("{step} into {target}");
            assert!(answers[0].0 == answers[1].0, "{about}: other content");
            match target.contains("data_file_raw") {
                true => assert!(answers[0].2 == answers[1].2, "{about}: other bytes in the raw data file"),
                false => assert_eq!(answers[0].1, answers[1].1, "{about}: allocation"),
            }
        }
    }
}

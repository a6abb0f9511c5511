// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The real QEMU tools as oracle, in a folder of the test's own.

// Each test binary uses its own part of this module.
#![allow(dead_code)]

use cowshed_storage::rt;
use cowshed_testbase::programs::{Said, finish, finish_well};
use cowshed_testbase::temp_dir;
use std::future::Future;
use std::path::PathBuf;
use std::process::Command;

/// A folder for images, on a real disk.
pub struct Bench {
    folder: tempfile::TempDir,
}

impl Bench {
    pub fn new() -> Self {
        Bench { folder: temp_dir() }
    }

    /// The full name of a file.
    pub fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().expect("a name in UTF-8").to_owned()
    }

    /// Runs a tool in the folder.
    pub fn tool(&self, tool: &str, args: &[&str]) -> Said {
        finish(Command::new(tool).current_dir(self.folder.path()).args(args))
    }

    /// Runs qemu-img, which must succeed, and returns its output.
    pub fn qemu_img(&self, args: &[&str]) -> String {
        finish_well(Command::new("qemu-img").current_dir(self.folder.path()).args(args))
    }

    /// Runs commands of qemu-io on an image.
    pub fn qemu_io(&self, image: &str, commands: &[&str]) {
        let mut args = Vec::new();
        for command in commands {
            args.extend(["-c", command]);
        }
        args.push(image);
        let text = finish_well(Command::new("qemu-io").current_dir(self.folder.path()).args(&args));
        assert!(!text.contains("failed"), "qemu-io {commands:?}: {text}");
    }

    /// `qemu-img check` finds nothing.
    pub fn assert_clean(&self, image: &str, what: &str) {
        let said = self.tool("qemu-img", &["check", image]);
        assert_eq!(said.code, Some(0), "{what}: {}{}", said.out, said.err);
    }

    /// Asserts by `qemu-img compare` that two images read the same.
    pub fn assert_same(&self, one: &str, other: &str, what: &str) {
        let said = self.tool("qemu-img", &["compare", one, other]);
        assert_eq!(said.code, Some(0), "{what}: {}{}", said.out, said.err);
    }

    /// A raw file of `len` bytes with data, zeroes and holes in a pattern that follows from `seed`.
    pub fn pattern(&self, name: &str, len: u64, seed: u64) -> PathBuf {
        use std::os::unix::fs::FileExt;
        let path = self.folder.path().join(name);
        let file = std::fs::File::create(&path).expect("a file");
        file.set_len(len).expect("its length");
        let mut state = seed;
        let mut at = 0;
        while at < len {
            let run = (1 + next(&mut state) % 40) * [512, 4096, 65536][(next(&mut state) % 3) as usize];
            let run = run.min(len - at);
            match next(&mut state) % 3 {
                0 => {}
                1 => file.write_all_at(&vec![0; run as usize], at).expect("zeroes"),
                _ => file.write_all_at(&text(run as usize, &mut state), at).expect("data"),
            }
            at += run;
        }
        path
    }
}

/// Bytes that compress about as well as programs do.
fn text(len: usize, state: &mut u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        let word = next(state);
        bytes.extend_from_slice(&word.to_le_bytes()[..(1 + word % 8) as usize]);
        bytes.extend(std::iter::repeat_n(b'x', (word >> 60) as usize));
    }
    bytes.truncate(len);
    bytes
}

fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 16
}

/// Runs a job to its end.
pub fn run<F: Future>(future: F) -> F::Output {
    rt::block_on(future)
}

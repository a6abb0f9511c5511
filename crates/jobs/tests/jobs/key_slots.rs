// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Key slots: our changes open in QEMU, QEMU's open here, and a refusal changes nothing.

use cowshed_create::{CreateRequest, prepare};
use cowshed_image::open;
use cowshed_image::secret::Secret;
use cowshed_jobs::key_slots::{KeySlotOptions, run};
use cowshed_jobs::{ImageSpec, JobHandle};
use cowshed_storage::rt;
use cowshed_testbase::programs::{finish, finish_well};
use cowshed_testbase::temp_dir;
use cowshed_types::Result;
use std::path::{Path, PathBuf};
use std::process::Command;

const PASSPHRASES: [&str; 3] = ["one", "two", "three"];

fn secrets() -> Vec<(String, Secret)> {
    PASSPHRASES.iter().map(|text| ((*text).to_owned(), Secret::new(text.as_bytes().to_vec()))).collect()
}

/// An image of a format, its passphrase "one".
struct Image {
    format: &'static str,
    prefix: &'static str,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl Image {
    fn new(format: &'static str) -> Image {
        let folder = temp_dir();
        let path = folder.path().join("image");
        let (prefix, more) = if format == "luks" { ("", "") } else { ("encrypt.", "encrypt.format=luks,") };
        let request = CreateRequest {
            filename: path.display().to_string(),
            format: format.to_owned(),
            size: Some(1 << 20),
            options: vec![format!("{more}{prefix}key-secret=one,{prefix}iter-time=1")],
            secrets: secrets(),
            ..CreateRequest::default()
        };
        rt::block_on(async { prepare(&request).await.unwrap().run().await }).unwrap();
        Image { format, prefix, path, _folder: folder }
    }

    fn options(&self, secret: &str) -> String {
        format!("driver={},{}key-secret={secret},file.filename={}", self.format, self.prefix, self.path.display())
    }

    fn spec(&self, secret: &str) -> ImageSpec {
        ImageSpec { image_opts: true, secrets: secrets(), ..ImageSpec::file(self.options(secret)) }
    }

    /// Changes slots with the key that `secret` opens.
    fn amend(&self, secret: &str, options: &str, force: bool) -> Result<()> {
        let options: Vec<String> = options.split(',').map(|option| format!("{}{option}", self.prefix)).collect();
        let options = KeySlotOptions { image: self.spec(secret), options: vec![options.join(",")], force };
        rt::block_on(run(&options, &JobHandle::new()))
    }

    /// The same by QEMU.
    fn amend_by_qemu(&self, secret: &str, options: &str, force: bool) {
        let options: Vec<String> = options.split(',').map(|option| format!("{}{option}", self.prefix)).collect();
        let mut command = Command::new("qemu-img");
        command.arg("amend").args(objects()).args(["--image-opts", &self.options(secret), "-o", &options.join(",")]);
        finish_well(command.args(force.then_some("--force")));
    }

    /// Asserts which secrets open it, by us and by QEMU.
    #[track_caller]
    fn expect_ways(&self, expected: &[&str]) {
        let ours = |secret: &&str| {
            let spec = self.spec(secret);
            let node = rt::block_on(open(spec.request().unwrap()));
            node.is_ok_and(|node| rt::block_on(node.close()).is_ok())
        };
        let theirs = |secret: &&str| {
            let out = self.path.with_extension("out").display().to_string();
            let read = ["convert", "--image-opts", &self.options(secret), "-O", "raw", &out];
            finish(Command::new("qemu-img").args(read).args(objects())).code == Some(0)
        };
        let by_us: Vec<&str> = PASSPHRASES.into_iter().filter(|text| ours(text)).collect();
        let by_qemu: Vec<&str> = PASSPHRASES.into_iter().filter(|text| theirs(text)).collect();
        assert_eq!((&by_us[..], &by_qemu[..]), (expected, expected), "{}", self.format);
    }
}

fn objects() -> Vec<String> {
    let objects = PASSPHRASES.iter().map(|text| ["--object".to_owned(), format!("secret,id={text},data={text}")]);
    objects.flatten().collect()
}

#[test]
fn slots_are_filled_and_erased_and_qemu_agrees() {
    for format in ["qcow2", "luks"] {
        let image = Image::new(format);
        image.expect_ways(&["one"]);
        image.amend("one", "state=active,new-secret=two,iter-time=1", false).unwrap();
        image.expect_ways(&["one", "two"]);
        image.amend_by_qemu("two", "state=active,new-secret=three,iter-time=10,keyslot=7", false);
        image.expect_ways(&PASSPHRASES);
        image.amend("three", "state=inactive,old-secret=one", false).unwrap();
        image.expect_ways(&["two", "three"]);
        image.amend("three", "state=active,new-secret=one,keyslot=1,iter-time=1", true).unwrap();
        image.expect_ways(&["one", "three"]);
        image.amend_by_qemu("one", "state=inactive,old-secret=three", false);
        image.expect_ways(&["one"]);
        // The only slot is overwritten, and at last erased.
        image.amend("one", "state=active,new-secret=two,keyslot=1,iter-time=1", true).unwrap();
        image.expect_ways(&["two"]);
        image.amend("two", "state=inactive,keyslot=1", true).unwrap();
        image.expect_ways(&[]);
    }
}

#[test]
fn what_is_refused_changes_nothing() {
    for format in ["qcow2", "luks"] {
        let image = Image::new(format);
        let before = std::fs::read(&image.path).unwrap();
        for (secret, options, word) in [
            ("one", "state=active,new-secret=two,keyslot=0", "Refusing to overwrite active keyslot 0"),
            ("one", "state=active,new-secret=two,keyslot=8", "Invalid keyslot 8"),
            ("one", "state=active,new-secret=two,old-secret=one", "'old-secret' must not be given when activating"),
            ("one", "state=active,new-secret=four", "No secret with id 'four'"),
            ("one", "state=active", "'new-secret' is required"),
            ("two", "state=active,new-secret=two,iter-time=1", "Invalid password, cannot unlock any keyslot"),
            ("one", "state=inactive", "To erase keyslot(s)"),
            ("one", "state=inactive,new-secret=two", "'new-secret' must not be given when erasing"),
            ("one", "state=inactive,keyslot=3", "already erased"),
            ("one", "state=inactive,keyslot=0", "the only active keyslot 0"),
            ("one", "state=inactive,keyslot=0,old-secret=two", "doesn't contain the given old password"),
            ("one", "state=inactive,old-secret=one", "All the active keyslots match"),
            ("one", "state=inactive,old-secret=two", "No keyslots match"),
            ("one", "state=perhaps", "'perhaps'"),
            ("one", "iter-time=10", "'state' is missing"),
            ("one", "cipher-alg=aes-128", "cipher-alg"),
        ] {
            let error = image.amend(secret, options, false).expect_err(options).to_string();
            assert!(error.contains(word) && error.contains("image"), "{format} {options}: {error}");
            assert!(std::fs::read(&image.path).unwrap() == before, "{format} {options}");
        }
        for _ in 0..7 {
            image.amend("one", "state=active,new-secret=two,iter-time=1", false).unwrap();
        }
        let error = image.amend("one", "state=active,new-secret=two,iter-time=1", false).expect_err("full").to_string();
        assert!(error.contains("all keyslots are in use"), "{error}");
        // All of them full, and one is overwritten: the others open it meanwhile.
        image.amend("one", "state=active,new-secret=three,keyslot=0,iter-time=1", true).unwrap();
        image.expect_ways(&["two", "three"]);
    }
}

#[test]
fn images_without_key_slots_are_refused_by_name() {
    let folder = temp_dir();
    let refused = |path: &Path, format: &str, options: &str| {
        let image = ImageSpec::file(path.display().to_string()).format(format);
        let options = KeySlotOptions { image, options: vec![options.to_owned()], force: false };
        rt::block_on(run(&options, &JobHandle::new())).expect_err("no slots").to_string()
    };
    let raw = folder.path().join("plain.raw");
    std::fs::write(&raw, [0; 4096]).unwrap();
    assert!(refused(&raw, "raw", "state=inactive").contains("plain.raw"));
    let plain = folder.path().join("plain.qcow2");
    let request = CreateRequest {
        filename: plain.display().to_string(),
        format: "qcow2".to_owned(),
        size: Some(1 << 20),
        ..CreateRequest::default()
    };
    rt::block_on(async { prepare(&request).await.unwrap().run().await }).unwrap();
    let said = refused(&plain, "qcow2", "encrypt.state=inactive,encrypt.keyslot=0");
    assert!(said.contains("plain.qcow2") && said.contains("isn't encrypted"), "{said}");
}

// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Encrypted qcow2 images of QEMU's: read and written here, and the writes read by QEMU.

use cowshed_image::secret::Secret;
use cowshed_image::{Node, OpenRequest, ZeroFlags, open};
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::programs::run;
use std::path::Path;
use std::sync::Arc;

const SIZE: usize = 4 << 20;

const SECRET: &str = "secret,id=s,data=geheim";

/// An image of QEMU's.
fn create(options: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    // Data files are looked for from where we run.
    let data_file = format!("data_file={}/", folder.path().display());
    let options = format!("encrypt.key-secret=s,{}", options.replace("data_file=", &data_file));
    let size = SIZE.to_string();
    let args = ["create", "-q", "-f", "qcow2", "--object", SECRET, "-o", &options, "a.qcow2", &size];
    run("qemu-img", folder.path(), &args);
    folder
}

fn request(folder: &Path, password: &str) -> OpenRequest {
    let path = folder.join("a.qcow2");
    let request =
        OpenRequest::image_opts(&format!("driver=qcow2,encrypt.key-secret=s,file.filename={}", path.display()));
    request.unwrap().secrets([("s".to_owned(), Secret::new(password.into()))])
}

fn open_now(folder: &Path, writable: bool) -> Arc<Node> {
    rt::block_on(open(request(folder, "geheim").writable(writable))).unwrap()
}

fn read(node: &Node, at: usize, len: usize) -> Vec<u8> {
    let (result, buf) = rt::block_on(node.read(at as u64, IoBuf::zeroed(len)));
    result.unwrap();
    buf.to_vec()
}

/// The whole disk as QEMU reads it.
fn qemu_reads(folder: &Path) -> Vec<u8> {
    let image = "driver=qcow2,encrypt.key-secret=s,file.filename=a.qcow2";
    run("qemu-img", folder, &["convert", "--object", SECRET, "--image-opts", image, "-O", "raw", "out.raw"]);
    std::fs::read(folder.join("out.raw")).unwrap()
}

fn is_clean(folder: &Path) {
    let image = "driver=qcow2,encrypt.key-secret=s,file.filename=a.qcow2";
    run("qemu-img", folder, &["check", "--object", SECRET, "--image-opts", image]);
}

/// Writes of neighbouring bytes, several to a sector, all at once: none may undo another.
fn side_by_side(node: &Arc<Node>, model: &mut [u8], start: usize, random: &mut Random) {
    let mut at = start;
    let mut writes = Vec::new();
    while writes.len() < 12 && at < SIZE {
        let len = (1 + random.below(300)).min(SIZE - at);
        let byte = 1 + random.below(255) as u8;
        model[at..at + len].fill(byte);
        writes.push((at as u64, vec![byte; len]));
        at += len;
    }
    rt::block_on(async {
        let tasks: Vec<_> = writes
            .into_iter()
            .map(|(at, bytes)| {
                let node = Arc::clone(node);
                rt::spawn(async move { node.write(at, IoBuf::copy_from(&bytes)).await.0 })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
    });
}

/// Numbers that only depend on the seed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % limit
    }
}

#[test]
fn images_of_qemu_are_read_and_written() {
    let matrix = [
        "encrypt.format=luks,encrypt.iter-time=10",
        "encrypt.format=luks,encrypt.iter-time=10,encrypt.cipher-alg=aes-128,encrypt.cipher-mode=cbc,encrypt.ivgen-alg=essiv,\
         encrypt.ivgen-hash-alg=sha256,cluster_size=4k",
        "encrypt.format=luks,encrypt.iter-time=10,encrypt.cipher-alg=serpent-256,cluster_size=16k,extended_l2=on",
        "encrypt.format=luks,encrypt.iter-time=10,encrypt.hash-alg=sha512,cluster_size=512,refcount_bits=64",
        "encrypt.format=luks,encrypt.iter-time=10,data_file=data.raw",
        "encrypt.format=aes",
        "encrypt.format=aes,cluster_size=4k,compat=0.10",
    ];
    for (index, options) in matrix.into_iter().enumerate() {
        let folder = create(options);
        let at = folder.path();
        let image = "driver=qcow2,encrypt.key-secret=s,file.filename=a.qcow2";
        let commands = ["-c", "write -P 7 0 700k", "-c", "write -P 9 3000k 13k", "-c", "write -z 100k 64k"];
        run("qemu-io", at, &[&["--object", SECRET, "--image-opts", image], &commands[..]].concat());
        let mut model = qemu_reads(at);
        let node = open_now(at, false);
        assert!(read(&node, 0, SIZE) == model, "{options}: we read something else");
        rt::block_on(node.close()).unwrap();
        // Random requests of any bytes beside a model.
        let node = open_now(at, true);
        let mut random = Random(index as u64 + 1);
        for _ in 0..200 {
            let start = random.below(SIZE - 1);
            let most = [700, 90_000][random.below(2)];
            let len = 1 + random.below((SIZE - start).min(most));
            match random.below(7) {
                5 if !options.contains("data_file") => {
                    // Whole clusters: their discarded ranges read as zeroes.
                    let unit = if options.contains("cluster_size=4k") { 4096 } else { 65536 };
                    let (start, len) =
                        (start / unit * unit, len.next_multiple_of(unit).min(SIZE - start / unit * unit));
                    rt::block_on(node.discard(start as u64, len as u64)).unwrap();
                    model[start..start + len].fill(0);
                }
                0 => {
                    rt::block_on(node.write_zeroes(start as u64, len as u64, ZeroFlags::default())).unwrap();
                    model[start..start + len].fill(0);
                }
                1 => assert!(read(&node, start, len) == model[start..start + len], "{options}: {start}+{len}"),
                2 => side_by_side(&node, &mut model, start, &mut random),
                _ => {
                    let byte = 1 + random.below(255) as u8;
                    let (result, _) = rt::block_on(node.write(start as u64, IoBuf::copy_from(&vec![byte; len])));
                    result.unwrap_or_else(|error| panic!("{options}: write {start}+{len}: {error}"));
                    model[start..start + len].fill(byte);
                }
            }
        }
        rt::block_on(node.close()).unwrap();
        is_clean(at);
        assert!(qemu_reads(at) == model, "{options}: QEMU reads something else");
        let node = open_now(at, false);
        assert!(read(&node, 0, SIZE) == model, "{options}: we read something else after it was closed");
        rt::block_on(node.close()).unwrap();
        // Nothing of it is in the file as plain text.
        let stored = std::fs::read(at.join("a.qcow2")).unwrap();
        assert!(!stored.windows(64).any(|bytes| bytes == [7; 64]), "{options}: plain text in the file");
    }
}

#[test]
fn the_legacy_method_is_read() {
    // QEMU's tools make such images for the sake of old ones.
    let folder = create("encrypt.format=aes");
    let at = folder.path();
    let image = "driver=qcow2,encrypt.key-secret=s,file.filename=a.qcow2";
    run(
        "qemu-io",
        at,
        &["--object", SECRET, "--image-opts", image, "-c", "write -P 7 10k 700k", "-c", "write -P 1 3M 1k"],
    );
    let node = open_now(at, false);
    assert!(read(&node, 0, SIZE) == qemu_reads(at));
    rt::block_on(node.close()).unwrap();
    // No passphrase is wrong: a wrong key shows nowhere.
    let node = rt::block_on(open(request(at, "falsch"))).unwrap();
    assert!(read(&node, 16 << 10, 64 << 10) != vec![7; 64 << 10]);
    rt::block_on(node.close()).unwrap();
}

#[test]
fn wrong_passphrases_and_damaged_slots_are_one_clear_error() {
    let folder = create("encrypt.format=luks,encrypt.iter-time=10");
    let at = folder.path();
    let path = at.join("a.qcow2");
    let image = std::fs::read(&path).unwrap();
    let refused = |request: OpenRequest| rt::block_on(open(request)).expect_err("refused").to_string();
    let text = refused(request(at, "falsch"));
    assert!(text.contains("a.qcow2") && text.contains("Invalid password, cannot unlock any keyslot"), "{text}");
    let text = refused(
        OpenRequest::image_opts(&format!("driver=qcow2,encrypt.key-secret=t,file.filename={}", path.display()))
            .unwrap(),
    );
    assert!(text.contains("No secret with id 't'"), "{text}");
    let aes = format!("driver=qcow2,encrypt.format=aes,encrypt.key-secret=s,file.filename={}", path.display());
    let text =
        refused(OpenRequest::image_opts(&aes).unwrap().secrets([("s".to_owned(), Secret::new(b"geheim".to_vec()))]));
    assert!(text.contains("Header reported 'luks' encryption format but options specify 'aes'"), "{text}");
    // Without a key: the image's description can be had, its data can't.
    let text = refused(OpenRequest::file(path.to_str().unwrap()));
    assert!(text.contains("Parameter 'encrypt.key-secret' is required for cipher"), "{text}");
    let node = rt::block_on(open(OpenRequest::file(path.to_str().unwrap()).without_content())).unwrap();
    let (result, _) = rt::block_on(node.read(0, IoBuf::zeroed(512)));
    assert!(result.is_ok(), "nothing is written there yet");
    rt::block_on(node.close()).unwrap();
    let text = refused(OpenRequest::file(path.to_str().unwrap()).writable(true));
    assert!(text.contains("encrypt.key-secret"), "{text}");
    // The header's area starts at the place in the extension; every kind of damage there is refused and changes
    // nothing.
    let start = image.windows(6).position(|bytes| bytes == b"LUKS\xba\xbe").expect("a LUKS header");
    for (at_byte, word) in [
        (0, "luks_magic"),
        (8, "cipher_name"),
        (40, "cipher_mode"),
        (72, "luks_hash"),
        (104, "luks_payload_offset"),
        (108, "key_bytes"),
        (208, "luks_key_slot"),
        (208 + 44, "luks_key_slot_stripes"),
        (208 + 40, "luks_key_slot_offset"),
        (208 + 4, "luks_iterations"),
        (112, "Invalid password"),
        (132, "Invalid password"),
        (208 + 8, "Invalid password"),
    ] {
        let mut damaged = image.clone();
        damaged[start + at_byte] ^= 0x7f;
        std::fs::write(&path, &damaged).unwrap();
        let text = refused(request(at, "geheim").writable(true));
        assert!(text.contains("a.qcow2") && text.contains(word), "byte {at_byte}: {text}");
        assert!(std::fs::read(&path).unwrap() == damaged);
    }
}

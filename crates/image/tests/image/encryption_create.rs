// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Encrypted images of our own making, in qcow2 and as volumes of the format `luks`: the real QEMU and cryptsetup read
//! them, and we theirs.

use cowshed_create::{CreateRequest, prepare};
use cowshed_image::secret::Secret;
use cowshed_image::{Node, OpenRequest, Preallocation, ZeroFlags, open};
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::programs::{output, run};
use std::path::Path;
use std::sync::Arc;

const SIZE: usize = 2 << 20;
const SECRET: &str = "secret,id=s,data=geheim";
const NAME: &str = "a.image";

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn secrets() -> Vec<(String, Secret)> {
    vec![("s".to_owned(), Secret::new(b"geheim".to_vec()))]
}

/// Creates an image of ours.
fn create(folder: &Path, format: &str, options: &str, size: usize) {
    let request = CreateRequest {
        filename: folder.join(NAME).display().to_string(),
        format: format.to_owned(),
        size: Some(size as u64),
        options: vec![options.to_owned()],
        secrets: secrets(),
        ..CreateRequest::default()
    };
    let created = rt::block_on(async { prepare(&request).await?.run().await });
    created.unwrap_or_else(|error| panic!("{format} {options}: {error}"));
}

/// Creates one of QEMU's.
fn create_theirs(folder: &Path, format: &str, options: &str) {
    let size = SIZE.to_string();
    let args = ["create", "-q", "-f", format, "--object", SECRET, "-o", options, NAME, &size];
    run("qemu-img", folder, &args);
}

/// Options that open the image, with its file's name.
fn image_opts(format: &str, path: &str) -> String {
    let key = if format == "luks" { "key-secret=s" } else { "encrypt.key-secret=s" };
    format!("driver={format},{key},file.filename={path}")
}

fn open_ours(folder: &Path, format: &str, writable: bool) -> Arc<Node> {
    let options = image_opts(format, &folder.join(NAME).display().to_string());
    let request = OpenRequest::image_opts(&options).unwrap().secrets(secrets()).writable(writable);
    rt::block_on(open(request)).unwrap_or_else(|error| panic!("{error}"))
}

fn close(node: &Node) {
    rt::block_on(node.close()).unwrap();
}

fn write(node: &Node, at: usize, bytes: &[u8]) {
    rt::block_on(node.write(at as u64, IoBuf::copy_from(bytes))).0.unwrap();
}

fn read_all(node: &Node) -> Vec<u8> {
    let (result, buf) = rt::block_on(node.read(0, IoBuf::zeroed(node.size() as usize)));
    result.unwrap();
    buf.to_vec()
}

fn read_theirs(folder: &Path, format: &str) -> Vec<u8> {
    let args = ["convert", "--object", SECRET, "--image-opts", &image_opts(format, NAME), "-O", "raw", "out.raw"];
    run("qemu-img", folder, &args);
    std::fs::read(folder.join("out.raw")).unwrap()
}

fn write_theirs(folder: &Path, format: &str, command: &str) {
    run("qemu-io", folder, &["--object", SECRET, "--image-opts", &image_opts(format, NAME), "-c", command]);
}

/// Bytes that are different in every place.
fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 7 + at * 13 + seed) as u8 | 1).collect()
}

/// Both write to the image and both read the same.
fn in_turns(folder: &Path, format: &str, what: &str) {
    let node = open_ours(folder, format, true);
    let mut model = read_all(&node);
    for (at, len, seed) in [(700, 3000, 1), (SIZE / 2, 200_000, 2), (SIZE - 513, 513, 3)] {
        let bytes = pattern(len, seed);
        write(&node, at, &bytes);
        model[at..at + len].copy_from_slice(&bytes);
    }
    rt::block_on(node.write_zeroes(1000, 100, ZeroFlags::default())).unwrap();
    model[1000..1100].fill(0);
    close(&node);
    assert!(read_theirs(folder, format) == model, "{what}: QEMU reads something else");
    write_theirs(folder, format, "write -P 9 300k 70k");
    model[300 << 10..370 << 10].fill(9);
    let node = open_ours(folder, format, false);
    assert!(read_all(&node) == model, "{what}: we read something else");
    close(&node);
    let stored = std::fs::read(folder.join(NAME)).unwrap();
    assert!(!stored.windows(64).any(|bytes| bytes == [9; 64]), "{what}: plain text in the file");
}

/// Cipher, mode, generator of vectors, hash of the generator, hash of the key derivation.
const COMBINATIONS: &[&str] = &[
    "",
    "cipher-alg=aes-128",
    "cipher-alg=aes-256,cipher-mode=cbc,ivgen-alg=essiv",
    "cipher-alg=aes-128,cipher-mode=cbc,ivgen-alg=essiv,ivgen-hash-alg=sha256,hash-alg=sha1",
    "cipher-alg=aes-256,cipher-mode=cbc,ivgen-alg=plain,hash-alg=sha512",
    "cipher-alg=aes-256,cipher-mode=ecb",
    "cipher-alg=aes-256,ivgen-alg=essiv,hash-alg=ripemd160",
    "cipher-alg=serpent-128,hash-alg=sha224",
    "cipher-alg=serpent-256,cipher-mode=cbc,ivgen-alg=essiv,hash-alg=sha384",
    "cipher-alg=twofish-256,ivgen-alg=plain",
    "cipher-alg=twofish-128,cipher-mode=cbc,ivgen-alg=plain64,ivgen-hash-alg=sha256",
    "cipher-alg=aes-128,cipher-mode=cbc,ivgen-alg=essiv,ivgen-hash-alg=md5,hash-alg=md5",
    "cipher-alg=cast5-128,cipher-mode=cbc",
    "cipher-alg=cast5-128,cipher-mode=ctr,ivgen-alg=plain",
    "cipher-alg=aes-256,cipher-mode=ctr",
    "cipher-alg=serpent-192,hash-alg=sha256",
];

/// The options with a prefix, a passphrase and little work per guess.
fn options_of(combination: &str, prefix: &str) -> String {
    let all = format!("key-secret=s,iter-time=10,{combination}");
    let items: Vec<String> =
        all.split(',').filter(|item| !item.is_empty()).map(|item| format!("{prefix}{item}")).collect();
    items.join(",")
}

#[test]
fn every_combination_goes_both_ways() {
    for (number, combination) in COMBINATIONS.iter().enumerate() {
        for (format, prefix) in [("qcow2", "encrypt."), ("luks", "")] {
            if format == "luks" && number % 4 != 0 {
                continue;
            }
            let mut options = options_of(combination, prefix);
            if format == "qcow2" {
                options.push_str(",encrypt.format=luks");
            }
            let ours = folder();
            create(ours.path(), format, &options, SIZE);
            in_turns(ours.path(), format, &format!("ours, {format} {combination}"));
            let theirs = folder();
            create_theirs(theirs.path(), format, &options);
            in_turns(theirs.path(), format, &format!("theirs, {format} {combination}"));
        }
    }
}

#[test]
fn every_layout_holds_an_encryption_header() {
    for options in [
        "cluster_size=512",
        "cluster_size=512,refcount_bits=64",
        "cluster_size=2M",
        "compat=0.10",
        "compat=0.10,preallocation=metadata",
        "preallocation=metadata",
        "preallocation=falloc",
        "preallocation=full,cluster_size=4k",
        "preallocation=full,extended_l2=on,cluster_size=16k",
        "data_file=data.raw",
        "data_file=data.raw,preallocation=full",
        "data_file=data.raw,data_file_raw=on",
        "lazy_refcounts=on,refcount_bits=1",
    ] {
        let folder = folder();
        let data_file = format!("data_file={}/", folder.path().display());
        let options = options.replace("data_file=", &data_file);
        let options = format!("{options},encrypt.format=luks,{}", options_of("cipher-alg=aes-128", "encrypt."));
        create(folder.path(), "qcow2", &options, SIZE);
        let image = image_opts("qcow2", NAME);
        run("qemu-img", folder.path(), &["check", "--object", SECRET, "--image-opts", &image]);
        // Preallocated space reads as zeroes, too.
        let node = open_ours(folder.path(), "qcow2", false);
        assert!(read_all(&node) == vec![0; SIZE], "{options}");
        close(&node);
        assert!(read_theirs(folder.path(), "qcow2") == vec![0; SIZE], "{options}");
        in_turns(folder.path(), "qcow2", &options);
        run("qemu-img", folder.path(), &["check", "--object", SECRET, "--image-opts", &image]);
        let node = open_ours(folder.path(), "qcow2", true);
        let mut model = read_all(&node);
        rt::block_on(node.resize((SIZE + (1 << 20)) as u64, preallocation_of(&options))).unwrap();
        model.resize(SIZE + (1 << 20), 0);
        assert!(read_all(&node) == model, "{options}: grown");
        write(&node, SIZE + 1000, &[7; 3000]);
        model[SIZE + 1000..SIZE + 4000].fill(7);
        assert!(read_all(&node) == model, "{options}: grown and written");
        close(&node);
        run("qemu-img", folder.path(), &["check", "--object", SECRET, "--image-opts", &image]);
        assert!(read_theirs(folder.path(), "qcow2") == model, "{options}: grown");
    }
}

/// A disk has whole sectors, and a shorter one keeps the bytes up to the size that was asked for.
#[test]
fn volumes_are_resized_to_whole_sectors() {
    let folder = folder();
    create(folder.path(), "luks", "key-secret=s,iter-time=10", SIZE);
    let node = open_ours(folder.path(), "luks", true);
    for (asked, whole) in [(SIZE + 1000, SIZE + 1024), (SIZE + 1536, SIZE + 1536), (1000, 1024)] {
        write(&node, 0, &[7; 1000]);
        rt::block_on(node.resize(asked as u64, Preallocation::Off)).unwrap();
        assert_eq!(node.size(), whole as u64);
        assert_eq!(read_all(&node)[..1000], [7; 1000]);
    }
    close(&node);
    assert_eq!(read_theirs(folder.path(), "luks")[..1000], [7; 1000]);
}

/// Ciphers that only newer versions of QEMU have; `cowshed_crypto` has the known facts.
#[test]
fn what_newer_versions_have_is_written_and_read_by_us() {
    for combination in
        ["cipher-alg=sm4", "cipher-alg=sm4,cipher-mode=ctr,hash-alg=sm3", "hash-alg=sm3,cipher-alg=aes-192"]
    {
        let folder = folder();
        create(folder.path(), "luks", &options_of(combination, ""), SIZE);
        let node = open_ours(folder.path(), "luks", true);
        let bytes = pattern(100_000, 5);
        write(&node, 300, &bytes);
        close(&node);
        let node = open_ours(folder.path(), "luks", false);
        assert!(read_all(&node)[300..][..bytes.len()] == bytes, "{combination}");
        close(&node);
        let stored = std::fs::read(folder.path().join(NAME)).unwrap();
        assert!(!stored.windows(64).any(|window| window == &bytes[..64]), "{combination}: plain text in the file");
    }
}

#[test]
fn what_does_not_go_together_is_refused_by_name() {
    let folder = folder();
    for (options, reason) in [
        ("cipher-alg=des", "Algorithm 'des' not supported"),
        ("cipher-alg=3des", "Algorithm '3des' not supported"),
        ("cipher-alg=rot13", "'cipher-alg' does not accept value 'rot13'"),
        ("cipher-alg=cast5-128", "blocks of 16 bytes"),
        ("cipher-mode=gcm", "'cipher-mode' does not accept value 'gcm'"),
        ("hash-alg=md4", "'hash-alg' does not accept value 'md4'"),
        ("cipher-mode=cbc,ivgen-alg=essiv,ivgen-hash-alg=sha1", "key"),
    ] {
        let request = CreateRequest {
            filename: folder.path().join(NAME).display().to_string(),
            format: "luks".to_owned(),
            size: Some(1 << 20),
            options: vec![options_of(options, "")],
            secrets: secrets(),
            ..CreateRequest::default()
        };
        let created = rt::block_on(async { prepare(&request).await?.run().await });
        let text = created.expect_err(options).to_string();
        assert!(text.contains(reason), "{options}: {text}");
        assert!(!folder.path().join(NAME).exists(), "{options}: a file is there");
    }
}

/// For old readers' sake QEMU's tools make such images, and so do we.
#[test]
fn images_of_the_legacy_method_go_both_ways() {
    for options in [
        "encrypt.format=aes,encrypt.key-secret=s",
        "encryption=on,encrypt.key-secret=s,cluster_size=512",
        "encrypt.format=aes,encrypt.key-secret=s,compat=0.10,preallocation=metadata",
        "encrypt.format=aes,encrypt.key-secret=s,preallocation=full,cluster_size=4k",
        "encrypt.format=aes,encrypt.key-secret=s,extended_l2=on,cluster_size=16k",
        "encrypt.format=aes,encrypt.key-secret=s,data_file=data.raw,data_file_raw=on",
    ] {
        let folder = folder();
        let options = options.replace("data_file=", &format!("data_file={}/", folder.path().display()));
        create(folder.path(), "qcow2", &options, SIZE);
        let node = open_ours(folder.path(), "qcow2", false);
        assert!(read_all(&node) == vec![0; SIZE], "{options}");
        close(&node);
        assert!(read_theirs(folder.path(), "qcow2") == vec![0; SIZE], "{options}");
        in_turns(folder.path(), "qcow2", &options);
        let image = image_opts("qcow2", NAME);
        run("qemu-img", folder.path(), &["check", "--object", SECRET, "--image-opts", &image]);
    }
    let folder = folder();
    for (options, reason) in [
        ("encrypt.format=aes", "Parameter 'encrypt.key-secret' is required for cipher"),
        ("encryption=on,encrypt.format=aes", "'encrypt.format' and its alias 'encryption' can't be used"),
        ("encrypt.format=aes,encrypt.key-secret=s,encrypt.iter-time=10", "Parameter 'encrypt.iter-time' is unexpected"),
        ("encrypt.key-secret=s", "encrypt.format"),
    ] {
        let request = CreateRequest {
            filename: folder.path().join(NAME).display().to_string(),
            format: "qcow2".to_owned(),
            size: Some(1 << 20),
            options: vec![options.to_owned()],
            secrets: secrets(),
            ..CreateRequest::default()
        };
        let created = rt::block_on(async { prepare(&request).await?.run().await });
        let text = created.expect_err(options).to_string();
        assert!(text.contains(reason), "{options}: {text}");
    }
}

fn preallocation_of(options: &str) -> Preallocation {
    match options {
        options if options.contains("=metadata") => Preallocation::Metadata,
        options if options.contains("=falloc") => Preallocation::Falloc,
        options if options.contains("=full") => Preallocation::Full,
        _ => Preallocation::Off,
    }
}

#[test]
fn an_encrypted_overlay_stands_on_any_backing_file() {
    let folder = folder();
    let at = folder.path();
    std::fs::write(at.join("base.raw"), pattern(SIZE / 2 + 512, 5)).unwrap();
    for subclusters in ["", "cluster_size=64k,extended_l2=on,"] {
        let base = at.join("base.raw");
        let options = format!(
            "{subclusters}backing_file={},backing_fmt=raw,encrypt.format=luks,{}",
            base.display(),
            options_of("", "encrypt.")
        );
        create(at, "qcow2", &options, SIZE);
        in_turns(at, "qcow2", &options);
        let image = image_opts("qcow2", NAME);
        run("qemu-img", at, &["check", "--object", SECRET, "--image-opts", &image]);
    }
}

#[test]
fn cryptsetup_and_we_understand_each_other() {
    let folder = folder();
    let at = folder.path();
    std::fs::write(at.join("pass"), "geheim").unwrap();
    let opens = |image: &str| {
        let args = ["open", "--type", "luks1", "--test-passphrase", "--key-file", "pass", image];
        output("cryptsetup", at, &args)
    };
    create(at, "luks", &options_of("cipher-alg=aes-256", ""), SIZE);
    let dump = run("cryptsetup", at, &["luksDump", NAME]);
    assert!(dump.contains("xts-plain64") && dump.contains("Key Slot 0: ENABLED"), "{dump}");
    let (good, text) = opens(NAME);
    assert!(good, "{text}");
    // Their tool changes the key slots of ours, and formats a volume of its own.
    std::fs::write(at.join("new"), "neu").unwrap();
    let change = |args: &[&str], image: &str| {
        run("cryptsetup", at, &[args, &["--key-file", "pass", image]].concat());
    };
    let iterations = ["-q", "--pbkdf-force-iterations", "1000"];
    let add = |image: &str| {
        let args = [&["luksAddKey"], &iterations[..], &["--key-file", "pass", image, "new"]].concat();
        run("cryptsetup", at, &args);
    };
    add(NAME);
    let format = [&["luksFormat", "--type", "luks1"], &iterations[..]].concat();
    for (name, cipher, bits) in [("essiv", "aes-cbc-essiv:sha256", "256"), ("plain", "aes-cbc-plain", "128")] {
        std::fs::write(at.join(name), vec![0; 4 << 20]).unwrap();
        change(&[&format[..], &["--cipher", cipher, "--key-size", bits]].concat(), name);
        add(name);
    }
    for (name, passphrase) in [(NAME, "neu"), ("essiv", "geheim"), ("essiv", "neu"), ("plain", "neu"), (NAME, "geheim")]
    {
        let options = image_opts("luks", &at.join(name).display().to_string());
        let secret = ("s".to_owned(), Secret::new(passphrase.into()));
        let request = OpenRequest::image_opts(&options).unwrap().secrets([secret]).writable(true);
        let node = rt::block_on(open(request)).unwrap_or_else(|error| panic!("{name} {passphrase}: {error}"));
        write(&node, 100, &pattern(5000, 1));
        close(&node);
        let args = ["convert", "--object", SECRET, "--image-opts", &image_opts("luks", name), "-O", "raw", "out.raw"];
        run("qemu-img", at, &args);
        assert!(std::fs::read(at.join("out.raw")).unwrap()[100..5100] == pattern(5000, 1), "{name}");
    }
    run("cryptsetup", at, &["luksKillSlot", "-q", "--key-file", "new", NAME, "0"]);
    assert!(!opens(NAME).0, "slot 0 is gone");
    let options = image_opts("luks", &at.join(NAME).display().to_string());
    let error = rt::block_on(open(OpenRequest::image_opts(&options).unwrap().secrets(secrets())));
    assert!(error.expect_err("slot 0 is gone").to_string().contains("Invalid password"));
}

#[test]
fn a_header_may_be_detached() {
    let folder = folder();
    let at = folder.path();
    create(at, "luks", &options_of("detached-header=on", ""), SIZE);
    assert_eq!(std::fs::metadata(at.join(NAME)).unwrap().len(), 4040 * 512);
    std::fs::write(at.join("payload"), vec![0; SIZE]).unwrap();
    let options = format!(
        "driver=luks,key-secret=s,file.filename={0}/payload,header.driver=file,header.filename={0}/{NAME}",
        at.display()
    );
    let request = || OpenRequest::image_opts(&options).unwrap().secrets(secrets());
    let node = rt::block_on(open(request().writable(true))).unwrap();
    assert_eq!(node.size(), SIZE as u64);
    write(&node, 3, &pattern(9000, 4));
    close(&node);
    let node = rt::block_on(open(request())).unwrap();
    assert!(read_all(&node)[3..9003] == pattern(9000, 4));
    close(&node);
    // cryptsetup opens our volume, and we open its.
    std::fs::write(at.join("pass"), "geheim").unwrap();
    let test = ["open", "--type", "luks1", "--test-passphrase", "--key-file", "pass", "--header"];
    run("cryptsetup", at, &[&test[..], &[NAME, "payload"]].concat());
    std::fs::write(at.join("other"), vec![0; SIZE]).unwrap();
    let format = ["-q", "luksFormat", "--type", "luks1", "--pbkdf-force-iterations", "1000", "--key-file", "pass"];
    run("cryptsetup", at, &[&format[..], &["--header", "theirs", "other"]].concat());
    let others = options.replace("/payload", "/other").replace(&format!("/{NAME}"), "/theirs");
    let node = rt::block_on(open(OpenRequest::image_opts(&others).unwrap().secrets(secrets()).writable(true))).unwrap();
    write(&node, 3, &pattern(9000, 4));
    assert!(read_all(&node)[3..9003] == pattern(9000, 4));
    close(&node);
    // A header needs no size.
    let request = CreateRequest {
        filename: at.join("sizeless").display().to_string(),
        format: "luks".to_owned(),
        options: vec![options_of("detached-header=on", "")],
        secrets: secrets(),
        ..CreateRequest::default()
    };
    let plan = rt::block_on(prepare(&request)).unwrap();
    assert!(plan.summary().contains("fmt=luks size=-1 key-secret=s"), "{}", plan.summary());
    rt::block_on(plan.run()).unwrap();
    assert_eq!(std::fs::metadata(at.join("sizeless")).unwrap().len(), 4040 * 512);
    // The header alone is no volume.
    let alone = OpenRequest::image_opts(&image_opts("luks", &at.join(NAME).display().to_string())).unwrap();
    let error = rt::block_on(open(alone.secrets(secrets()))).expect_err("there is no payload");
    assert!(error.to_string().contains("detached"), "{error}");
}

#[test]
fn damaged_volumes_are_refused_by_name() {
    let folder = folder();
    let at = folder.path();
    create(at, "luks", &options_of("", ""), SIZE);
    let path = at.join(NAME);
    let image = std::fs::read(&path).unwrap();
    let refused = |passphrase: &str| {
        let request = OpenRequest::image_opts(&image_opts("luks", &path.display().to_string())).unwrap();
        let secret = ("s".to_owned(), Secret::new(passphrase.into()));
        rt::block_on(open(request.secrets([secret]))).expect_err("refused").to_string()
    };
    let text = refused("falsch");
    assert!(text.contains(NAME) && text.contains("Invalid password, cannot unlock any keyslot"), "{text}");
    assert!(!text.contains("falsch"), "{text}");
    for (len, word) in [(0, "header"), (100, "header"), (592, "payload_offset"), (1 << 20, "payload_offset")] {
        std::fs::write(&path, &image[..len]).unwrap();
        let text = refused("geheim");
        assert!(text.contains(NAME) && text.contains(word), "{len} bytes: {text}");
    }
    for (byte, word) in [(0, "luks_magic"), (7, "luks_version"), (8, "cipher_name"), (208 + 4, "luks_iterations")] {
        let mut damaged = image.clone();
        damaged[byte] ^= 0x7f;
        std::fs::write(&path, &damaged).unwrap();
        let text = refused("geheim");
        assert!(text.contains(NAME) && text.contains(word), "byte {byte}: {text}");
    }
    // Without a key there is no data.
    std::fs::write(&path, &image).unwrap();
    let text = rt::block_on(open(OpenRequest::file(path.to_str().unwrap()))).expect_err("refused").to_string();
    assert!(text.contains(NAME) && text.contains("key-secret"), "{text}");
    let node = rt::block_on(open(OpenRequest::file(path.to_str().unwrap()).without_content())).unwrap();
    assert_eq!(node.driver_name(), "luks");
    let (result, _) = rt::block_on(node.read(0, IoBuf::zeroed(512)));
    assert!(result.expect_err("no key").to_string().contains("key-secret"));
    close(&node);
}

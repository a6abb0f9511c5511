// SPDX-License-Identifier: Apache-2.0 OR MIT
//! LUKS volumes of QEMU's are opened and decrypted; ours are opened by QEMU and by cryptsetup.

use cowshed_crypto::luks::Volume;
use cowshed_crypto::{CipherSpec, Hash, SECTOR_BYTES};
use cowshed_layout::luks::{HEADER_BYTES, LuksHeader};
use cowshed_testbase::programs::{output, run};
use cowshed_testbase::temp_dir;
use std::path::Path;

const PASSPHRASE: &str = "the key, and \"more\"";

fn folder() -> tempfile::TempDir {
    let folder = temp_dir();
    std::fs::write(folder.path().join("pass"), PASSPHRASE).unwrap();
    folder
}

const SECRET: &str = "secret,id=s,file=pass";
const IMAGE: &str = "driver=luks,key-secret=s,file.filename=a.luks";

/// The cipher options of QEMU, with the name that the header has for the mode.
const MODES: [(&str, &str); 5] = [
    ("cipher-mode=xts,ivgen-alg=plain64", "xts-plain64"),
    ("cipher-mode=xts,ivgen-alg=plain", "xts-plain"),
    ("cipher-mode=cbc,ivgen-alg=essiv,ivgen-hash-alg=sha256", "cbc-essiv:sha256"),
    ("cipher-mode=cbc,ivgen-alg=plain64", "cbc-plain64"),
    ("cipher-mode=xts,ivgen-alg=essiv,ivgen-hash-alg=sha256", "xts-essiv:sha256"),
];

fn open(bytes: &[u8], passphrase: &[u8]) -> Option<(Volume, cowshed_crypto::SectorCipher)> {
    let header = LuksHeader::parse(&bytes[..HEADER_BYTES]).unwrap();
    let volume = Volume::new(header, bytes.len() as u64).unwrap();
    let keys: Vec<_> = volume
        .active_slots()
        .filter_map(|slot| {
            let area = volume.key_material(slot);
            volume.try_slot(slot, &bytes[area.start as usize..area.end as usize], passphrase).unwrap()
        })
        .collect();
    let cipher = keys.first().map(|key| volume.cipher(key).unwrap())?;
    Some((volume, cipher))
}

fn create(folder: &Path, options: &str) {
    let args = ["create", "-q", "-f", "luks", "--object", SECRET, "-o", options, "a.luks", "1M"];
    run("qemu-img", folder, &args);
}

#[test]
fn volumes_of_qemu_are_opened() {
    let folder = folder();
    let at = folder.path();
    let hashes = ["sha1", "sha224", "sha256", "sha384", "sha512", "ripemd160"];
    let mut seen = 0;
    // Keys of 192 bits end QEMU 7.2 with a failed assertion: their material isn't whole sectors.
    // Some of the combinations: QEMU takes a second for each.
    let wanted: [(&str, &[usize]); 5] = [
        ("aes-256", &[0, 1, 2, 3, 4]),
        ("aes-128", &[0, 2]),
        ("serpent-256", &[0]),
        ("twofish-128", &[2]),
        ("twofish-256", &[0]),
    ];
    for (cipher, modes) in wanted {
        for index in modes {
            let (options, mode) = MODES[*index];
            let hash = hashes[seen % hashes.len()];
            let options = format!("key-secret=s,cipher-alg={cipher},{options},hash-alg={hash},iter-time=10");
            create(at, &options);
            let io = ["--object", SECRET, "--image-opts", IMAGE, "-c", "write -P 7 0 64k", "-c", "write -P 9 999k 1k"];
            run("qemu-io", at, &io);
            let bytes = std::fs::read(at.join("a.luks")).unwrap();
            assert!(open(&bytes, b"another").is_none(), "{options}");
            let (volume, sectors) = open(&bytes, PASSPHRASE.as_bytes()).unwrap_or_else(|| panic!("{options}"));
            assert_eq!((volume.header().cipher_mode.as_str(), volume.hash().name()), (mode, hash));
            let payload = volume.header().payload_offset as usize;
            let mut data = bytes[payload..payload + (1 << 20)].to_vec();
            sectors.decrypt(0, &mut data);
            assert!(data[..64 << 10].iter().all(|byte| *byte == 7), "{options}");
            assert!(data[999 << 10..1000 << 10].iter().all(|byte| *byte == 9), "{options}");
            seen += 1;
        }
    }
    assert_eq!(seen, 10);
}

#[test]
fn qemu_and_cryptsetup_open_ours() {
    let folder = folder();
    let at = folder.path();
    let ciphers = [
        ("aes", 32, "xts-plain64"),
        ("aes", 64, "xts-plain64"),
        ("aes", 32, "cbc-essiv:sha256"),
        ("aes", 16, "cbc-plain64"),
        ("serpent", 64, "xts-plain64"),
        ("twofish", 32, "cbc-essiv:sha256"),
    ];
    for (index, (name, key_bytes, mode)) in ciphers.into_iter().enumerate() {
        // cryptsetup refuses MD5, and the installed QEMU may not know SM3 yet.
        let hashes: Vec<Hash> =
            Hash::ALL.map(|(_, hash)| hash).into_iter().filter(|hash| !matches!(hash, Hash::Md5 | Hash::Sm3)).collect();
        let hash = hashes[index % hashes.len()];
        let spec = CipherSpec::parse(name, mode).unwrap();
        let (mut volume, key) = Volume::create(spec, hash, key_bytes, 1000).unwrap();
        let payload = volume.header().payload_offset as usize;
        let mut bytes = vec![0; payload];
        // The passphrase is that of a later slot than the first.
        for (slot, passphrase) in [(0, "another"), (5, PASSPHRASE)] {
            let material = volume.fill_slot(slot, &key, passphrase.as_bytes(), 1500).unwrap();
            let area = volume.key_material(slot);
            bytes[area.start as usize..area.end as usize].copy_from_slice(&material);
        }
        bytes[..HEADER_BYTES].copy_from_slice(&volume.header().encode());
        let mut data = vec![0x5c; 300 * SECTOR_BYTES];
        volume.cipher(&key).unwrap().encrypt(0, &mut data);
        bytes.extend_from_slice(&data);
        std::fs::write(at.join("a.luks"), &bytes).unwrap();
        let io = run("qemu-io", at, &["--object", SECRET, "--image-opts", IMAGE, "-c", "read -P 0x5c 0 150k"]);
        assert!(!io.contains("failed"), "{name} {mode}: {io}");
        let dump = run("cryptsetup", at, &["luksDump", "a.luks"]);
        assert!(dump.contains(&volume.header().uuid) && dump.contains(mode), "{dump}");
        // cryptsetup opens key slots by the kernel, where that has the device mapper.
        let test = ["luksOpen", "--test-passphrase", "--batch-mode", "--key-file"];
        let (good, said) = output("cryptsetup", at, &[&test[..], &["pass", "a.luks"]].concat());
        if said.contains("Cannot initialize device-mapper") {
            eprintln!("NOT RUN: cryptsetup luksOpen (this kernel has no device mapper)");
            continue;
        }
        assert!(good, "{said}");
        std::fs::write(at.join("wrong"), "wrong").unwrap();
        assert!(!output("cryptsetup", at, &[&test[..], &["wrong", "a.luks"]].concat()).0);
    }
}

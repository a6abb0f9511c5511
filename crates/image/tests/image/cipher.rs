// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Encryption is carried by the extents: with a dummy cipher whose tweak is the host sector, everything that moves data
//! must encrypt it again.

use cowshed_create::{qcow2::Qcow2CreateOptions, write_fresh_qcow2};
use cowshed_image::formats::qcow2::{Cipher, Qcow2Driver};
use cowshed_image::formats::{EncryptionOptions, OpenContext, Qcow2RuntimeOptions};
use cowshed_storage::{File, IoBuf, OpenOptions, rt};
use cowshed_types::{GuestOffset, HostOffset};
use std::path::Path;
use std::sync::Arc;

/// Each byte is changed by the number of its host sector and by its place in it.
struct HostSectors;

impl HostSectors {
    fn apply(host: HostOffset, bytes: &mut [u8]) {
        assert!(host.is_aligned(9) && bytes.len().is_multiple_of(512), "ciphers work on whole sectors");
        for (index, byte) in bytes.iter_mut().enumerate() {
            let at = host.0 + index as u64;
            *byte ^= ((at >> 9).wrapping_mul(37) as u8).wrapping_add(at as u8) | 1;
        }
    }
}

impl Cipher for HostSectors {
    fn encrypt(&self, _: GuestOffset, host: HostOffset, bytes: &mut [u8]) {
        Self::apply(host, bytes);
    }
    fn decrypt(&self, _: GuestOffset, host: HostOffset, bytes: &mut [u8]) {
        Self::apply(host, bytes);
    }
}

fn file(path: &Path, create: bool) -> File {
    File::open(path, &OpenOptions { write: true, create, ..OpenOptions::default() }).unwrap()
}

async fn open(path: &Path) -> Qcow2Driver {
    let context = OpenContext {
        file: file(path, false),
        file_name: path.display().to_string(),
        data_file: None,
        backing: None,
        encryption: EncryptionOptions::default(),
        options: Qcow2RuntimeOptions::default(),
        writable: true,
        check: false,
        snapshot: None,
        no_backing: false,
        no_data: false,
        max_decompressed_bytes: u64::MAX,
    };
    Qcow2Driver::open_with_cipher(context, Some(Arc::new(HostSectors))).await.unwrap()
}

async fn read(driver: &Qcow2Driver, offset: u64, len: usize) -> Vec<u8> {
    let (result, buf) = driver.read(offset, IoBuf::zeroed(len)).await;
    result.unwrap();
    buf.to_vec()
}

/// Changes bytes of the image file directly.
fn patch(path: &Path, edit: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = std::fs::read(path).unwrap();
    edit(&mut bytes);
    std::fs::write(path, bytes).unwrap();
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

#[test]
fn moved_clusters_are_encrypted_for_their_new_place() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("dummy.qcow2");
    rt::block_on(async {
        let options = Qcow2CreateOptions { size: 1 << 20, ..Qcow2CreateOptions::default() };
        write_fresh_qcow2(&file(&path, true), &options).await.unwrap();
    });
    // crypt_method 1, the legacy method, has no further metadata.
    patch(&path, |bytes| bytes[35] = 1);
    let mut model = vec![0u8; 1 << 20];
    let mut write = |driver: &Qcow2Driver, at: usize, len: usize, byte: u8| {
        model[at..at + len].fill(byte);
        let (result, _) = rt::block_on(driver.write(at as u64, IoBuf::copy_from(&vec![byte; len])));
        result.unwrap();
        let whole = rt::block_on(read(driver, 0, model.len()));
        assert!(whole == model, "after writing {len} bytes at {at}");
    };
    let driver = rt::block_on(open(&path));
    write(&driver, 65536 + 512, 1024, 0x11);
    write(&driver, 65536, 65536 * 2, 0x22);
    write(&driver, 65536 * 2 + 4096, 512, 0x33);
    rt::block_on(driver.close()).unwrap();
    drop(driver);

    // Nothing of the plain text is in the file, and the zeroes around small writes are encrypted as well.
    let bytes = std::fs::read(&path).unwrap();
    assert!(!bytes.windows(64).any(|window| window == [0x22; 64]));

    // Without COPIED a write must copy the cluster: from one host sector's tweak to another's.
    let l1 = word(&bytes, 40) as usize;
    let l2 = (word(&bytes, l1) & 0x00ff_ffff_ffff_fe00) as usize;
    patch(&path, |bytes| bytes[l2 + 8] &= 0x7f);
    let before = word(&bytes, l2 + 8) & 0x00ff_ffff_ffff_fe00;
    let driver = rt::block_on(open(&path));
    write(&driver, 65536 + 8192, 512, 0x44);
    rt::block_on(driver.close()).unwrap();
    drop(driver);
    let bytes = std::fs::read(&path).unwrap();
    assert_ne!(word(&bytes, l2 + 8) & 0x00ff_ffff_ffff_fe00, before, "the cluster has moved");
    let driver = rt::block_on(open(&path));
    assert!(rt::block_on(read(&driver, 0, model.len())) == model);
}

// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The encryption of a new image: its options, and the LUKS header made of them.

use crate::schema::OptionValues;
use cowshed_crypto::luks::{self, MasterKey, Volume, iterations_for};
use cowshed_crypto::{Algorithm, Chaining, CipherSpec, Hash, InitialVector, SectorCipher, legacy_aes};
use cowshed_image::encryption::{Cipher, SectorsOf};
use cowshed_image::secret::Secret;
use cowshed_layout::luks::HEADER_BYTES;
use cowshed_storage::{File, IoBuf, rt};
use cowshed_types::{Error, Result};
use std::sync::Arc;

/// QEMU's `iter-time` where none is given, in milliseconds.
const DEFAULT_ITERATION_MS: u64 = 2000;
/// The digest of the master key costs this part of a key slot: it is looked at once for each slot.
const DIGEST_SHARE: u32 = 8;

/// Ciphers by QEMU's names: with their key length in bytes, `None` for those that LUKS has no name for.
const CIPHERS: &[(&str, Option<(Algorithm, u32)>)] = &[
    ("aes-128", Some((Algorithm::Aes, 16))),
    ("aes-192", Some((Algorithm::Aes, 24))),
    ("aes-256", Some((Algorithm::Aes, 32))),
    ("serpent-128", Some((Algorithm::Serpent, 16))),
    ("serpent-192", Some((Algorithm::Serpent, 24))),
    ("serpent-256", Some((Algorithm::Serpent, 32))),
    ("twofish-128", Some((Algorithm::Twofish, 16))),
    ("twofish-192", Some((Algorithm::Twofish, 24))),
    ("twofish-256", Some((Algorithm::Twofish, 32))),
    ("cast5-128", Some((Algorithm::Cast5, 16))),
    ("sm4", Some((Algorithm::Sm4, 16))),
    ("des", None),
    ("3des", None),
];

/// A new LUKS volume, inside of a qcow2 image or alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewEncryption {
    /// Cipher, mode and initial vectors of the data.
    pub spec: CipherSpec,
    /// Length of the master key in bytes.
    pub key_bytes: u32,
    /// Hash of the key derivation.
    pub hash: Hash,
    /// The time that one guess of the passphrase should cost.
    pub iteration_ms: u64,
    /// Id of the secret with the passphrase.
    pub key_secret: Option<String>,
    /// The passphrase. Needed to create, not to measure.
    pub secret: Option<Secret>,
}

/// The encryption of a new qcow2 image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageEncryption {
    /// LUKS, its header in the image.
    Luks(NewEncryption),
    /// The legacy AES method, for the sake of old readers only: it is unsafe by design.
    LegacyAes {
        /// Id of the secret with the passphrase.
        key_secret: Option<String>,
        /// The passphrase. Needed to create, not to measure.
        secret: Option<Secret>,
    },
}

/// The encryption of a new image: its cipher, and with LUKS the volume.
pub(crate) struct MadeEncryption {
    /// The LUKS header and its key slots; `None` with the legacy AES method.
    pub volume: Option<NewVolume>,
    /// The cipher of the data.
    pub cipher: Arc<dyn Cipher>,
}

impl ImageEncryption {
    /// From the `-o` values of a qcow2 image; `None` when they ask for none.
    pub fn from_values(values: &OptionValues) -> Result<Option<ImageEncryption>> {
        const ALIAS: &str = "'encrypt.format' and its alias 'encryption' can't be used at the same time";
        let format = match (values.is_given("encryption"), values.get("encrypt.format")) {
            (true, Some(_)) => return Err(Error::invalid_argument(ALIAS)),
            (true, None) if values.switch("encryption") => Some("aes"),
            (_, format) => format,
        };
        match format {
            None => match values.given_with("encrypt.").next() {
                Some(option) => {
                    let error = Error::invalid_argument("Parameter 'encrypt.format' is missing");
                    Err(error.hint(format!(": '{option}' needs it")))
                }
                None => Ok(None),
            },
            Some("luks") => NewEncryption::from_values(values, "encrypt.").map(|new| Some(ImageEncryption::Luks(new))),
            Some("aes") => {
                let known = ["encrypt.format", "encrypt.key-secret"];
                if let Some(option) = values.given_with("encrypt.").find(|option| !known.contains(option)) {
                    return Err(Error::invalid_argument(format!("Parameter '{option}' is unexpected")));
                }
                let key_secret = values.get("encrypt.key-secret").map(str::to_owned);
                Ok(Some(ImageEncryption::LegacyAes { key_secret, secret: None }))
            }
            Some(other) => Err(not_accepted("encrypt.format", other)),
        }
    }

    /// With the passphrase that its options name.
    pub fn with_secrets(self, secrets: &[(String, Secret)]) -> Result<ImageEncryption> {
        const OPTION: &str = "encrypt.key-secret";
        match self {
            ImageEncryption::Luks(new) => new.with_secrets(OPTION, secrets).map(ImageEncryption::Luks),
            ImageEncryption::LegacyAes { key_secret, secret: None } => {
                let secret = Some(secret_of(OPTION, key_secret.as_deref(), secrets)?);
                Ok(ImageEncryption::LegacyAes { key_secret, secret })
            }
            has_one => Ok(has_one),
        }
    }

    /// Bytes of the LUKS header with all key slots; the legacy method has none.
    pub fn header_bytes(&self) -> u64 {
        match self {
            ImageEncryption::Luks(new) => new.header_bytes(),
            ImageEncryption::LegacyAes { .. } => 0,
        }
    }

    /// Makes keys and key slots: takes about [`NewEncryption::iteration_ms`].
    pub(crate) async fn make(&self) -> Result<MadeEncryption> {
        match self {
            ImageEncryption::Luks(new) => {
                let volume = new.make().await?;
                let cipher = Arc::new(SectorsOf { cipher: volume.cipher()?, by_host: true });
                Ok(MadeEncryption { volume: Some(volume), cipher })
            }
            ImageEncryption::LegacyAes { secret, .. } => {
                let secret = secret.as_ref().ok_or_else(needs_secret)?;
                let cipher = Arc::new(SectorsOf { cipher: legacy_aes(secret.as_bytes())?, by_host: false });
                Ok(MadeEncryption { volume: None, cipher })
            }
        }
    }
}

fn needs_secret() -> Error {
    Error::invalid_argument("an encrypted image needs the secret with its passphrase")
}

/// The secret of this id. `option` is the option that names it.
fn secret_of(option: &str, id: Option<&str>, secrets: &[(String, Secret)]) -> Result<Secret> {
    let Some(id) = id else {
        return Err(Error::invalid_argument(format!("Parameter '{option}' is required for cipher")));
    };
    let found = secrets.iter().find(|(known, _)| known == id);
    let (_, secret) = found.ok_or_else(|| Error::invalid_argument(format!("No secret with id '{id}'")))?;
    secret.clone().passphrase(id)
}

/// The volume, its master key, and the bytes to write.
pub(crate) struct NewVolume {
    pub volume: Volume,
    key: MasterKey,
    /// Key material of the first slot.
    material: Vec<u8>,
}

/// The `iter-time` that the option `name` has, in milliseconds. Messages call it `shown`. A negative one is too large
/// for every machine, as in QEMU.
pub fn iteration_ms(values: &OptionValues, name: &str, shown: &str) -> Result<u64> {
    // 0 is the default, as in QEMU.
    Ok(values.integer(name, shown)?.filter(|ms| *ms > 0).unwrap_or(DEFAULT_ITERATION_MS))
}

impl NewEncryption {
    /// From `-o` values, whose names start with `prefix` ("encrypt." or "").
    pub fn from_values(values: &OptionValues, prefix: &str) -> Result<NewEncryption> {
        let name = |key: &str| format!("{prefix}{key}");
        let get = |key: &str| values.get(&name(key));
        let (algorithm, width) = cipher(&name("cipher-alg"), get("cipher-alg").unwrap_or("aes-256"))?;
        let chaining = match get("cipher-mode").unwrap_or("xts") {
            "xts" => Chaining::Xts,
            "cbc" => Chaining::Cbc,
            "ecb" => Chaining::Ecb,
            "ctr" => Chaining::Ctr,
            other => return Err(not_accepted(&name("cipher-mode"), other)),
        };
        let vector_hash = get("ivgen-hash-alg").map(|hash| hash_of(&name("ivgen-hash-alg"), hash)).transpose()?;
        let initial_vector = match get("ivgen-alg").unwrap_or("plain64") {
            "plain" => InitialVector::Plain,
            "plain64" => InitialVector::Plain64,
            "essiv" => InitialVector::Essiv(vector_hash.unwrap_or(Hash::Sha256)),
            other => return Err(not_accepted(&name("ivgen-alg"), other)),
        };
        let iteration_ms = iteration_ms(values, &name("iter-time"), &name("iter-time"))?;
        let spec = CipherSpec { algorithm, chaining, initial_vector };
        let key_bytes = if chaining == Chaining::Xts { 2 * width } else { width };
        // Parts that don't go together are refused before anything is touched.
        SectorCipher::new(spec, &vec![0; key_bytes as usize])?;
        Ok(NewEncryption {
            spec,
            key_bytes,
            hash: hash_of(&name("hash-alg"), get("hash-alg").unwrap_or("sha256"))?,
            iteration_ms,
            key_secret: get("key-secret").map(str::to_owned),
            secret: None,
        })
    }

    /// With the passphrase that its options name. `option` is the name of that option.
    pub fn with_secrets(mut self, option: &str, secrets: &[(String, Secret)]) -> Result<NewEncryption> {
        if self.secret.is_some() {
            return Ok(self);
        }
        self.secret = Some(secret_of(option, self.key_secret.as_deref(), secrets)?);
        Ok(self)
    }

    /// Bytes of the header with all key slots: in a file of the format `luks` the payload begins there.
    pub fn header_bytes(&self) -> u64 {
        luks::new_header_bytes(self.key_bytes)
    }

    /// Bytes of a file of the format `luks` whose disk has `size` bytes; with `detached` that is elsewhere.
    pub fn file_bytes(&self, size: u64, detached: bool) -> u64 {
        self.header_bytes() + if detached { 0 } else { size }
    }

    /// Makes the volume: takes about [`NewEncryption::iteration_ms`].
    pub(crate) async fn make(&self) -> Result<NewVolume> {
        let secret = self.secret.clone().ok_or_else(needs_secret)?;
        let NewEncryption { spec, key_bytes, hash, iteration_ms, .. } = *self;
        rt::run_on_cpu_pool(move || {
            let iterations = iterations_for(hash, key_bytes, iteration_ms)?;
            let (mut volume, key) = Volume::create(spec, hash, key_bytes, iterations / DIGEST_SHARE)?;
            let material = volume.fill_slot(0, &key, secret.as_bytes(), iterations)?;
            Ok(NewVolume { volume, key, material })
        })
        .await
    }
}

impl NewVolume {
    /// The cipher of the data.
    pub(crate) fn cipher(&self) -> Result<SectorCipher> {
        self.volume.cipher(&self.key)
    }

    /// The same, with its payload in another file.
    pub(crate) fn detached(mut self) -> NewVolume {
        self.volume = self.volume.detached();
        self
    }

    /// Writes everything but the header's first sector, which makes it one: [`NewVolume::write_first_sector`], behind a
    /// barrier.
    pub(crate) async fn write_rest(&self, file: &File, offset: u64) -> Result<()> {
        let header = self.volume.header().encode();
        let (_, rest) = header.split_at(cowshed_image::encryption::SECTOR_BYTES as usize);
        let material = self.volume.key_material(0).start;
        file.write_at(IoBuf::copy_from(&self.material), offset + material).await.0?;
        file.write_at(IoBuf::copy_from(rest), offset + cowshed_image::encryption::SECTOR_BYTES).await.0
    }

    /// See [`NewVolume::write_rest`].
    pub(crate) async fn write_first_sector(&self, file: &File, offset: u64) -> Result<()> {
        let header: [u8; HEADER_BYTES] = self.volume.header().encode();
        file.write_at(IoBuf::copy_from(&header[..cowshed_image::encryption::SECTOR_BYTES as usize]), offset).await.0
    }
}

fn cipher(option: &str, name: &str) -> Result<(Algorithm, u32)> {
    match CIPHERS.iter().find(|(known, _)| *known == name) {
        Some((_, Some(cipher))) => Ok(*cipher),
        Some((_, None)) => {
            // LUKS has no name for it.
            Err(Error::unsupported(format!("Algorithm '{name}' not supported")).field("cipher-alg"))
        }
        None => Err(not_accepted(option, name)),
    }
}

fn hash_of(option: &str, name: &str) -> Result<Hash> {
    let found = Hash::ALL.iter().find(|(known, _)| *known == name);
    found.map(|(_, hash)| *hash).ok_or_else(|| not_accepted(option, name))
}

fn not_accepted(option: &str, value: &str) -> Error {
    // QEMU leaves out which part of the image's options it is.
    let sentence = |option: &str| format!("Parameter '{option}' does not accept value '{value}'");
    Error::invalid_argument(sentence(option)).qemu(sentence(option.strip_prefix("encrypt.").unwrap_or(option)))
}

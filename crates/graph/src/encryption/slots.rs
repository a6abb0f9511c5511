// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Changes of key slots, in stages that a power cut may tear anywhere. An old way to open the volume lasts until its
//! replacement is durable.

use super::LuksArea;
use super::area::wrong_passphrase;
use crate::secret::Secret;
use cowshed_crypto::luks::{MasterKey, Stage, Volume, iterations_for};
use cowshed_layout::luks::SLOTS;
use cowshed_storage::{IoBuf, rt};
use cowshed_types::{Error, ErrorKind, Result};

/// A change of the key slots (`amend -o encrypt.state=…`).
#[derive(Clone, Debug)]
pub enum SlotChange {
    /// One more passphrase opens the volume (`active`).
    Activate {
        /// The slot, 0 to 7; the first free one if `None`.
        slot: Option<usize>,
        /// The passphrase.
        new_secret: Secret,
        /// Time that one guess of it should cost.
        iteration_ms: u64,
    },
    /// A slot is emptied (`inactive`).
    Deactivate {
        /// The slot, 0 to 7; all that the passphrase opens if `None`.
        slot: Option<usize>,
        /// The passphrase that is in it.
        old_secret: Option<Secret>,
    },
}

/// Changes key slots, durably. `secret` opens the volume now; emptying slots needs none. With `force` a slot in use is
/// overwritten, and the last one may go, with which all data is lost.
pub async fn change_slots(area: &LuksArea, secret: Option<&Secret>, change: &SlotChange, force: bool) -> Result<()> {
    let volume = area.volume().await?;
    match change {
        SlotChange::Activate { slot, new_secret, iteration_ms } => {
            let slot = free_slot(&volume, *slot, force)?;
            let secret = secret.ok_or_else(|| {
                Error::invalid_argument("a new key slot needs the secret that opens the image now ('key-secret')")
            })?;
            let key = area.master_key(&volume, secret).await?.ok_or_else(wrong_passphrase)?;
            KeySlots { area, volume }.activate(slot, key, new_secret, *iteration_ms).await
        }
        SlotChange::Deactivate { slot, old_secret } => {
            let slots = match (slot, old_secret) {
                (Some(slot), secret) => one_slot(area, &volume, *slot, secret.as_ref()).await?,
                (None, Some(secret)) => slots_of(area, &volume, secret).await?,
                (None, None) => return Err(nothing_to_erase()),
            };
            if !force {
                some_left(&volume, *slot, slots.len())?;
            }
            let mut key_slots = KeySlots { area, volume };
            for slot in slots {
                key_slots.deactivate(slot).await?;
            }
            Ok(())
        }
    }
}

/// Refuses a change as [`change_slots`] does before it looks at any key: a slot, or `erases` without one. `by_secret`:
/// it erases by a passphrase.
pub async fn check_slot_change(
    area: &LuksArea,
    slot: Option<usize>,
    (erases, by_secret): (bool, bool),
    force: bool,
) -> Result<()> {
    let volume = area.volume().await?;
    match (erases, slot) {
        (false, _) => free_slot(&volume, slot, force).map(drop),
        (true, Some(slot)) => {
            check_in_use(&volume, slot)?;
            if force || by_secret { Ok(()) } else { some_left(&volume, Some(slot), 1) }
        }
        (true, None) if by_secret => Ok(()),
        (true, None) => Err(nothing_to_erase()),
    }
}

fn nothing_to_erase() -> Error {
    Error::invalid_argument(
        "To erase keyslot(s), either explicit keyslot index or the password currently contained in them must be given",
    )
}

/// Something must open the image when `erased` slots are gone.
fn some_left(volume: &Volume, slot: Option<usize>, erased: usize) -> Result<()> {
    if volume.active_slots().count() > erased {
        return Ok(());
    }
    let message = match slot {
        Some(slot) => format!(
            "Attempt to erase the only active keyslot {slot} which will erase all the data in the image irreversibly - \
             refusing operation"
        ),
        None => {
            "All the active keyslots match the (old) password that was given and erasing them will erase all the data \
                 in the image irreversibly - refusing operation"
                .to_owned()
        }
    };
    Err(Error::new(ErrorKind::PermissionDenied, message).field("keyslot"))
}

fn check_in_use(volume: &Volume, slot: usize) -> Result<()> {
    check_slot(slot)?;
    match is_active(volume, slot) {
        true => Ok(()),
        false => {
            // The blank at the end is QEMU's.
            let message = format!("Given keyslot {slot} is already erased (inactive) ");
            Err(Error::invalid_argument(message).field("keyslot"))
        }
    }
}

fn check_slot(slot: usize) -> Result<()> {
    if slot < SLOTS {
        return Ok(());
    }
    let message = format!("Invalid keyslot {slot} specified, must be between 0 and {}", SLOTS - 1);
    Err(Error::invalid_argument(message).field("keyslot"))
}

fn is_active(volume: &Volume, slot: usize) -> bool {
    volume.header().slots[slot].active
}

async fn one_slot(area: &LuksArea, volume: &Volume, slot: usize, secret: Option<&Secret>) -> Result<Vec<usize>> {
    check_in_use(volume, slot)?;
    let Some(secret) = secret else { return Ok(vec![slot]) };
    match area.try_slot(volume, slot, secret).await? {
        Some(_) => Ok(vec![slot]),
        None => {
            let message = format!("Given keyslot {slot} doesn't contain the given old password for erase operation");
            Err(Error::new(ErrorKind::PermissionDenied, message).field("keyslot"))
        }
    }
}

async fn slots_of(area: &LuksArea, volume: &Volume, secret: &Secret) -> Result<Vec<usize>> {
    let mut found = Vec::new();
    for slot in volume.active_slots() {
        if area.try_slot(volume, slot, secret).await?.is_some() {
            found.push(slot);
        }
    }
    match found.is_empty() {
        true => {
            let message = "No keyslots match given (old) password for erase operation";
            Err(Error::new(ErrorKind::PermissionDenied, message).field("keyslot"))
        }
        false => Ok(found),
    }
}

fn free_slot(volume: &Volume, wanted: Option<usize>, force: bool) -> Result<usize> {
    let Some(slot) = wanted else {
        let free = (0..SLOTS).find(|slot| !is_active(volume, *slot));
        return free.ok_or_else(|| {
            Error::new(ErrorKind::NoSpace, "Can't add a keyslot - all keyslots are in use").field("keyslot")
        });
    };
    check_slot(slot)?;
    match is_active(volume, slot) && !force {
        true => {
            let message = format!("Refusing to overwrite active keyslot {slot} - please erase it first");
            Err(Error::new(ErrorKind::PermissionDenied, message).field("keyslot").value(slot))
        }
        false => Ok(slot),
    }
}

struct KeySlots<'a> {
    area: &'a LuksArea,
    volume: Volume,
}

impl KeySlots<'_> {
    async fn activate(&mut self, slot: usize, key: MasterKey, secret: &Secret, iteration_ms: u64) -> Result<()> {
        let (hash, key_bytes) = (self.volume.hash(), self.volume.header().key_bytes);
        let iterations = rt::run_on_cpu_pool(move || iterations_for(hash, key_bytes, iteration_ms)).await?;
        if !is_active(&self.volume, slot) {
            return self.fill(slot, &key, secret, iterations).await;
        }
        // It is overwritten: meanwhile something must open the volume, another slot or a copy of the new one.
        let others = self.volume.active_slots().count() > 1;
        let spare = (0..SLOTS).find(|spare| !is_active(&self.volume, *spare)).filter(|_| !others);
        if let Some(spare) = spare {
            self.fill(spare, &key, secret, iterations).await?;
        }
        self.deactivate(slot).await?;
        self.fill(slot, &key, secret, iterations).await?;
        match spare {
            Some(spare) => self.deactivate(spare).await,
            None => Ok(()),
        }
    }

    async fn fill(&mut self, slot: usize, key: &MasterKey, secret: &Secret, iterations: u32) -> Result<()> {
        let (volume, key, secret) = (self.volume.clone(), key.clone(), secret.clone());
        let planned = rt::run_on_cpu_pool(move || volume.activation(slot, &key, secret.as_bytes(), iterations)).await;
        let (volume, stages) = planned?;
        self.write(stages).await?;
        self.volume = volume;
        Ok(())
    }

    async fn deactivate(&mut self, slot: usize) -> Result<()> {
        let (volume, stages) = self.volume.deactivation(slot)?;
        self.write(stages).await?;
        self.volume = volume;
        Ok(())
    }

    async fn write(&self, stages: Vec<Stage>) -> Result<()> {
        for stage in stages {
            for (offset, bytes) in stage {
                self.area.file.write_at(IoBuf::copy_from(&bytes), self.area.offset + offset).await.0?;
            }
            self.area.file.sync().await?;
        }
        Ok(())
    }
}

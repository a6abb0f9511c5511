// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory whose size comes from an image or a peer: where there is none, that is an error, and not the end of the
//! process.

use crate::{Errno, Error, Result};
use std::collections::{HashMap, HashSet};
use std::hash::Hash;

/// The error: there is no memory for this many bytes.
#[cold]
pub fn no_memory(bytes: usize) -> Error {
    Error::os(Errno::ENOMEM, "could not get memory").value(format!("{bytes} bytes"))
}

/// An empty vector with room for `len` items. `ENOMEM` where there is none.
pub fn vec_for<T>(len: usize) -> Result<Vec<T>> {
    let mut items = Vec::new();
    match items.try_reserve_exact(len) {
        Ok(()) => Ok(items),
        Err(_) => Err(no_memory(len.saturating_mul(size_of::<T>()))),
    }
}

/// Appends an item. `ENOMEM` where there is no memory for a longer list.
pub fn try_push<T>(items: &mut Vec<T>, item: T) -> Result<()> {
    items.try_reserve(1).map_err(|_| no_memory(2 * size_of_val(items.as_slice())))?;
    items.push(item);
    Ok(())
}

/// Appends all items of another list. `ENOMEM` where there is no memory for them.
pub fn try_extend<T>(items: &mut Vec<T>, more: Vec<T>) -> Result<()> {
    items.try_reserve(more.len()).map_err(|_| no_memory(size_of_val(more.as_slice())))?;
    items.extend(more);
    Ok(())
}

/// An empty set with room for `len` items. `ENOMEM` where there is none.
pub fn set_for<T: Eq + Hash>(len: usize) -> Result<HashSet<T>> {
    let mut items = HashSet::new();
    items.try_reserve(len).map_err(|_| no_memory(len.saturating_mul(size_of::<T>())))?;
    Ok(items)
}

/// Room for one more pair in a map. `ENOMEM` where there is none.
pub fn grow_map<K: Eq + Hash, V>(map: &mut HashMap<K, V>) -> Result<()> {
    map.try_reserve(1).map_err(|_| no_memory(map.len().saturating_mul(2 * size_of::<(K, V)>())))
}

/// Whether there is memory for this many bytes in many small pieces, none of which is tried alone. `ENOMEM` where there
/// is none.
pub fn expect_memory(bytes: usize) -> Result<()> {
    vec_for::<u8>(bytes).map(drop)
}

/// Collects items of a known number. `ENOMEM` where there is no memory.
pub fn try_collect<T>(items: impl ExactSizeIterator<Item = T>) -> Result<Vec<T>> {
    let mut all = vec_for(items.len())?;
    all.extend(items);
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_machine_has_is_an_error_that_says_how_much() {
        let error = vec_for::<u64>(usize::MAX / 16).expect_err("too much");
        assert_eq!(error.errno(), Errno::ENOMEM);
        assert!(error.to_string().contains("bytes"), "{error}");
        assert!(vec_for::<u8>(usize::MAX).is_err());
        assert!(expect_memory(4096).is_ok() && expect_memory(usize::MAX / 2).is_err());
        assert_eq!(try_collect([1, 2, 3].into_iter()).expect("three"), [1, 2, 3]);
        assert!(set_for::<u64>(usize::MAX / 16).is_err());
    }
}

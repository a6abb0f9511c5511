// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads which mutant, and which optimisations, the environment has switched. Only a build with `--cfg mutants` or
//! `--cfg ablation` has this module.

/// True when `COWSHED_SLIP` names this mutant.
#[cfg(mutants)]
pub fn is_slip(name: &str) -> bool {
    static CHOSEN: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    CHOSEN.get_or_init(|| std::env::var("COWSHED_SLIP").unwrap_or_default()) == name
}

/// True when `COWSHED_WITHOUT` names this optimisation. Names have commas between them.
#[cfg(ablation)]
#[inline(never)]
pub fn is_without(name: &str) -> bool {
    std::env::var("COWSHED_WITHOUT").is_ok_and(|names| names.split(',').any(|known| known == name))
}

// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The program as a file.

/// It needs no other file to run: neither an interpreter that puts it together nor shared libraries.
#[test]
fn the_program_is_linked_statically() {
    let program = std::fs::read(env!("CARGO_BIN_EXE_cowshed")).expect("our own binary");
    let number = |at: usize, len: usize| {
        let mut bytes = [0; 8];
        bytes[..len].copy_from_slice(&program[at..at + len]);
        usize::try_from(u64::from_le_bytes(bytes)).expect("an offset")
    };
    assert_eq!(program[..6], *b"\x7fELF\x02\x01", "a little-endian ELF file of 64 bits");
    let (table, entry_len, entries) = (number(0x20, 8), number(0x36, 2), number(0x38, 2));
    let kinds: Vec<usize> = (0..entries).map(|entry| number(table + entry * entry_len, 4)).collect();
    const PT_LOAD: usize = 1;
    const PT_INTERP: usize = 3;
    assert!(kinds.contains(&PT_LOAD), "{kinds:?}");
    let why = "flags in the environment or in a cargo configuration replace those of .cargo/config.toml";
    assert!(!kinds.contains(&PT_INTERP), "the program is linked dynamically: {why}");
}

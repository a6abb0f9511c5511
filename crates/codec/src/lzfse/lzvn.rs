// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Blocks of lzfse for short data: opcodes with a few literals and a match each.

use super::{CUT_OFF, Input, Output, Refusal};

/// Literals, then a match at a distance; none is the distance of the match before.
struct Step {
    literals: usize,
    len: usize,
    distance: Option<usize>,
}

/// Unpacks a block, whose opcodes take all of its bytes.
pub(super) fn unpack(packed: &[u8], output: &mut Output) -> Result<(), Refusal> {
    let mut input = Input { bytes: packed };
    let mut distance = 0;
    loop {
        let [opcode] = input.array()?;
        let step = match opcode {
            0x06 => break,
            0x0e | 0x16 => continue,
            _ => step(opcode, &mut input)?,
        };
        output.literals(input.take(step.literals)?)?;
        distance = step.distance.unwrap_or(distance);
        if step.len != 0 {
            output.repeat(distance, step.len)?;
        }
    }
    // The last opcode has seven more bytes.
    match input.bytes {
        [0, 0, 0, 0, 0, 0, 0] => Ok(()),
        rest if rest.len() < 7 => Err(CUT_OFF),
        _ => Err("a block goes on behind its last opcode"),
    }
}

/// Bits of an opcode by their letters: L literals, M match length, D distance.
fn step(opcode: u8, input: &mut Input) -> Result<Step, Refusal> {
    let byte = |input: &mut Input| input.array().map(|[byte]| usize::from(byte));
    let short = usize::from(opcode & 0xf);
    let literals = usize::from(opcode >> 6);
    let len = usize::from(opcode >> 3 & 7) + 3;
    Ok(match opcode {
        // 1110LLLL, or 16 and a byte of literals alone.
        0xe0 => Step { literals: 16 + byte(input)?, len: 0, distance: None },
        0xe1..=0xef => Step { literals: short, len: 0, distance: None },
        // 1111MMMM, or 16 and a byte of a match alone.
        0xf0 => Step { literals: 0, len: 16 + byte(input)?, distance: None },
        0xf1..=0xff => Step { literals: 0, len: short, distance: None },
        0x70..=0x7f | 0xd0..=0xdf => return Err("an opcode isn't known"),
        // 101LLMMM DDDDDDMM DDDDDDDD.
        0xa0..=0xbf => {
            let word = usize::from(u16::from_le_bytes(input.array()?));
            let len = (usize::from(opcode & 7) << 2 | word & 3) + 3;
            Step { literals: usize::from(opcode >> 3 & 3), len, distance: Some(word >> 2) }
        }
        // LLMMM111 DDDDDDDD DDDDDDDD.
        _ if opcode & 7 == 7 => Step { literals, len, distance: Some(usize::from(u16::from_le_bytes(input.array()?))) },
        // LLMMM110, with the distance of the match before.
        0x40.. if opcode & 7 == 6 => Step { literals, len, distance: None },
        _ if opcode & 7 == 6 => return Err("an opcode isn't known"),
        // LLMMMDDD DDDDDDDD.
        _ => Step { literals, len, distance: Some(usize::from(opcode & 7) << 8 | byte(input)?) },
    })
}

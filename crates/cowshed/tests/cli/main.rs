// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The command line tool from outside: as qemu-img, as a stranger meets it, and its documents.

mod as_qemu_img;
mod bad_input;
mod bitmap;
mod block_formats;
mod block_formats_damage;
mod check;
mod combinations;
mod containers;
mod damage;
mod documents;
mod encryption;
mod golden;
mod in_use;
mod io;
mod limits;
mod lost_streams;
mod manual;
mod missing_key;
mod names;
mod old_bytes;
mod on_servers;
mod onto_itself;
mod oracle;
mod program;
mod refusals;
mod running;
mod serving;
mod sessions;
mod stacked;
mod stranger;
mod unfinished;
mod user_scripts;
mod vmdk;
mod vmdk_damage;
mod words;

// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Command lines from seeds: sessions of qemu-io with every command and flag, and chains of qemu-img's verbs over their options.

use crate::case::Case;
use cowshed_testkit::random::Random;

/// Lines of one case.
const LINES: usize = 8;

/// Images that sessions use: the name, qemu-img's options, the size.
const IMAGES: &[(&str, &str, &str)] = &[
    ("plain", "-f qcow2", "2M"),
    ("small", "-f qcow2 -o cluster_size=4k", "1M"),
    ("parts", "-f qcow2 -o extended_l2=on,cluster_size=64k", "2M"),
    ("over", "-f qcow2 -b base -F qcow2", "2M"),
    ("old", "-f qcow2 -o compat=0.10", "2M"),
    ("zstd", "-f qcow2 -o compression_type=zstd", "2M"),
    ("odd", "-f qcow2 -o cluster_size=8k", "1000k"),
    ("outside", "-f qcow2 -o data_file=outside.raw", "2M"),
    ("full", "-f qcow2 -o preallocation=full", "512k"),
    ("flat", "-f raw", "1M"),
];

/// Sessions of qemu-io.
pub fn io_sessions(seed: u64) -> Case {
    let mut random = Random::new(seed);
    let mut case = Case::new(format!("qemu-io session {seed}"));
    case.setup.push("qemu-img create -q -f qcow2 base 1M".to_owned());
    case.setup.push("qemu-io -c 'write -P 3 0 300k' -c 'write -z 512k 64k' base".to_owned());
    let (name, options, size) = random.pick(IMAGES);
    case.setup.push(format!("qemu-img create -q {options} {name} {size}"));
    case.setup
        .push(format!("qemu-io -f {} -c 'write -P 7 64k 200k' -c 'write -z 128k 64k' {name}", format_of(options)));
    for _ in 0..LINES {
        let flags = session_flags(&mut random, options);
        let commands: String =
            (0..1 + random.below(5)).map(|_| format!(" -c '{}'", io_command(&mut random, name))).collect();
        // Background commands end at the command that waits for them: the order is the same each time.
        let mut commands = with_waits(&commands);
        // QEMU writes without a lock then.
        if flags.contains("-U -r") {
            commands = commands.replace("'reopen -w'", "'reopen -r'");
        }
        case.lines.push(format!("qemu-io {flags}{commands} {name}"));
    }
    // In QEMU a disk that grows over the state of a machine shows it.
    if case.contains(" -b ") {
        case.lines.iter_mut().for_each(|line| *line = line.replace("'truncate ", "'length "));
    }
    // QEMU doesn't compress into allocated clusters: other clusters are allocated then.
    if !case.contains("write -c ") {
        case.lines.push(format!("qemu-io -r -f {} -c map {name}", format_of(options)));
    }
    case
}

/// The commands with `aio_flush` behind those that run in the background.
fn with_waits(commands: &str) -> String {
    commands
        .split(" -c ")
        .filter(|command| !command.is_empty())
        .map(|command| {
            let wait = if command.starts_with("'aio_") { " -c aio_flush" } else { "" };
            format!(" -c {command}{wait}")
        })
        .collect()
}

fn format_of(options: &str) -> &str {
    if options.starts_with("-f raw") { "raw" } else { "qcow2" }
}

fn session_flags(random: &mut Random, options: &str) -> String {
    let mut flags = format!("-f {}", format_of(options));
    let more: &[&str] = &[
        "-r",
        "-U -r -t writeback",
        "-s",
        "-t writeback",
        "-t unsafe",
        "-t writethrough",
        "-d unmap",
        "-d ignore",
        "-m",
    ];
    if random.chance(35) {
        flags += &format!(" {}", random.pick(more));
    }
    if random.chance(4) {
        flags += random.pick(&[" -t nosuch", " -d nosuch", " -i nosuch", " -U", " -i native", " --nosuch", " -r -C"]);
    }
    flags
}

/// A number as people write it; now and then none.
fn place(random: &mut Random) -> String {
    match random.below(24) {
        0 => "-1".to_owned(),
        1 => random.pick(&["x", "1x", "1.5", "99999999999999999999", "8E", "0x", "''", "1kk"]).to_string(),
        2 => random.below(3 << 20).to_string(),
        3 => format!("0x{:x}", random.below(4096) * 512),
        4 => "1.5k".to_owned(),
        5..=8 => format!("{}", random.below(4096) * 512),
        9..=14 => format!("{}k", random.below(512) * 4),
        15 => "2M".to_owned(),
        16 => "1M".to_owned(),
        _ => format!("{}k", random.below(32) * 64),
    }
}

fn length(random: &mut Random) -> String {
    match random.below(20) {
        0 => random.pick(&["-512", "x", "0", "1", "4G", "3G"]).to_string(),
        1 => random.below(100_000).to_string(),
        2..=6 => format!("{}", 512 * (1 + random.below(200))),
        7..=12 => format!("{}k", 4 * (1 + random.below(50))),
        _ => format!("{}k", 64 * (1 + random.below(8))),
    }
}

/// Some of the flags, at random, and a pattern for `P`.
fn flags(random: &mut Random, known: &[&str]) -> String {
    let mut text = String::new();
    for flag in known {
        if random.chance(12) {
            text += &format!("{flag} ");
        }
    }
    if random.chance(45) {
        let pattern = random.pick(&["3", "7", "0", "0x7", "255", "256", "x"]);
        text += &format!("-P {pattern} ");
    }
    text
}

fn io_command(random: &mut Random, image: &str) -> String {
    let (at, len) = (place(random), length(random));
    match random.below(40) {
        0..=6 => format!("read {}{at} {len}", flags(random, &["-q", "-C", "-v -q", "-b", "-r", "-a"])),
        7 => {
            format!("read -P 7 {}{at} {len}", random.pick(&["-s 512 ", "-l 1k ", "-s 512 -l 512 ", "-s 1G ", "-l 1G "]))
        }
        8..=14 => format!("write {}{at} {len}", flags(random, &["-q", "-C", "-f", "-n", "-u", "-r", "-b"])),
        15..=17 => match random.pick(&["", "-u ", "-f ", "-n ", "-c ", "-P 3 ", "-z "]) {
            // Of parts of clusters QEMU zeroes what comes before the part that it refuses.
            "-n " => format!("write -z -n {}k {}k", random.below(32) * 64, 64 * (1 + random.below(8))),
            flag => format!("write -z {flag}{at} {len}"),
        },
        18 => format!("write -c {}{at} {len}", flags(random, &["-q", "-f"])),
        19 | 20 => format!("readv {}{at} {len} {}", flags(random, &["-q", "-C", "-r"]), length(random)),
        21 | 22 => format!("writev {}{at} {len} {}", flags(random, &["-q", "-C", "-f"]), length(random)),
        // In a cluster with subclusters ours discards the allocated ones.
        23 | 24 if image == "parts" => "flush".to_owned(),
        23 | 24 => format!("discard {}{at} {len}", random.pick(&["", "-q ", "-C ", "-x "])),
        25 => format!("aio_read {}{at} {len}", flags(random, &["-q", "-C", "-i"])),
        26 => format!("aio_write {}{at} {len}", flags(random, &["-q", "-C", "-f"])),
        27 => format!("aio_write -z {}{at} {len}", random.pick(&["", "-u ", "-q "])),
        28 => "aio_flush".to_owned(),
        29 => format!("alloc {at} {}", random.pick(&["", "64k", "512", "2M", "x", "-1"])),
        30 => "map".to_owned(),
        31 => "length".to_owned(),
        32 => "flush".to_owned(),
        33 => {
            format!("truncate {}{}", random.pick(&["", "-m off ", "-m nosuch "]), random.pick(&["3M", "2M", "x", "-1"]))
        }
        34 => random
            .pick(&[
                "reopen -r",
                "reopen -w",
                "reopen -c writeback",
                "reopen -o cache.direct=on",
                "reopen -o nosuch=1",
                "reopen",
            ])
            .to_string(),
        35 => format!("help {}", random.pick(&["nosuch", "quit x", ""])),
        36 => random
            .pick(&["quit", "close", "sleep 1", "sleep x", "nosuch", "info x", "length x", "map x", ""])
            .to_string(),
        37 => format!("open {image}"),
        38 => random
            .pick(&[
                "zone_report 0 1",
                "zone_open 0 1",
                "zone_reset 0 1",
                "zone_close 0 1",
                "zone_finish 0 1",
                "zone_append 0 512",
            ])
            .to_string(),
        _ => random
            .pick(&["break pwritev A", "remove_break A", "resume A", "sigraise x", "read", "write 0", "discard 0"])
            .to_string(),
    }
}

/// Chains of qemu-img's verbs.
pub fn img_chains(seed: u64) -> Case {
    let mut random = Random::new(seed);
    let mut case = Case::new(format!("qemu-img chain {seed}"));
    case.setup.push("qemu-img create -q -f qcow2 base 1M".to_owned());
    case.setup.push("qemu-io -c 'write -P 3 0 300k' -c 'write -z 512k 64k' base".to_owned());
    case.setup.push("qemu-img create -q -f qcow2 -b base -F qcow2 top 2M".to_owned());
    case.setup.push("qemu-io -c 'write -P 4 200k 200k' -c 'write -P 5 1500k 100k' top".to_owned());
    case.setup.push("qemu-img create -q -f raw flat 1M".to_owned());
    case.setup.push("qemu-io -f raw -c 'write -P 6 100k 300k' flat".to_owned());
    for number in 0..LINES + 4 {
        case.lines.push(img_line(&mut random, number));
    }
    case
}

fn create_options(random: &mut Random) -> String {
    let known: &[&str] = &[
        "cluster_size=4k",
        "cluster_size=64k",
        "cluster_size=2M",
        "cluster_size=3k",
        "cluster_size=256",
        "compat=0.10",
        "compat=1.1",
        "compat=v3",
        "compat=nosuch",
        "lazy_refcounts=on",
        "lazy_refcounts=maybe",
        "extended_l2=on",
        "extended_l2=off",
        "refcount_bits=1",
        "refcount_bits=16",
        "refcount_bits=64",
        "refcount_bits=7",
        "preallocation=metadata",
        "preallocation=falloc",
        "preallocation=full",
        "preallocation=nosuch",
        "compression_type=zstd",
        "compression_type=zlib",
        "compression_type=nosuch",
        "nosuch=1",
        "size=1M",
        "nocow=off",
        "data_file=d",
        "data_file_raw=on",
        "encryption=off",
        "backing_file=base,backing_fmt=qcow2",
    ];
    let mut chosen = Vec::new();
    for _ in 0..random.below(4) {
        chosen.push(random.pick(known));
    }
    if chosen.is_empty() { String::new() } else { format!("-o {} ", chosen.join(",")) }
}

/// The flag, but not `-f raw` for an image of another format: how long its file is, and what stands where, is the writer's
/// affair.
fn raw_of_flat<'a>(flag: &'a str, images: &[&str]) -> &'a str {
    if flag.contains("raw") && images.iter().any(|image| *image != "flat") { "" } else { flag }
}

fn img_line(random: &mut Random, number: usize) -> String {
    let image = random.pick(&["base", "top", "flat", "new", "copy", "nosuch"]);
    let other = random.pick(&["base", "top", "flat", "new", "copy"]);
    let size = random.pick(&["1M", "2M", "512k", "1.5M", "1000", "0", "+64k", "-64k", "x", "-1", "8E", "3000000"]);
    let format = random.pick(&["qcow2", "raw", "qcow2", "raw", "nosuch"]);
    let output = random.pick(&["", "", "--output=json ", "--output=human ", "--output=nosuch "]).to_owned();
    let quiet = if random.chance(10) { "-q " } else { "" };
    match random.below(30) {
        // After a failed creation QEMU has sometimes removed an older file.
        0..=4 => format!(
            "qemu-img create {quiet}-f {format} {}new {size} || {{ code=$?; rm -f new; exit $code; }}",
            create_options(random)
        ),
        5 => {
            let (flag, backing) = (random.pick(&["", "-u "]), random.pick(&["base", "top", "flat"]));
            // The holes in the file of an image are the writer's affair.
            let format = if format == "raw" && backing != "flat" { "qcow2" } else { format };
            format!("qemu-img create {quiet}{flag}-f qcow2 -b {backing} -F {format} new")
        }
        6 | 7 => format!(
            "qemu-img info {output}{}{image}",
            raw_of_flat(random.pick(&["", "--backing-chain ", "-U ", "-f qcow2 ", "-f raw "]), &[image])
        ),
        8 | 9 => format!(
            "qemu-img check {output}{}{image}",
            random.pick(&["", "-f qcow2 ", "-q ", "-r leaks ", "-r all ", "-r x "])
        ),
        10..=14 => {
            let flag = random.pick(&[
                "",
                "",
                "-c ",
                "-S 4k ",
                "-S 0 ",
                "-n ",
                "-W ",
                "-m 4 ",
                "-t none ",
                "-T writeback ",
                "-C ",
                "-q ",
                "-B base -F qcow2 ",
                "-l nosuch ",
                "-S x ",
                "-m 0 ",
                "-r 1M ",
            ]);
            // Onto itself QEMU reports the lock first, whatever else is wrong.
            let image = if image == "copy" { "new" } else { image };
            // A conversion that fails leaves its file in QEMU; here a new file goes.
            format!(
                "qemu-img convert {flag}-O {format} {}{image} copy || {{ code=$?; rm -f copy; exit $code; }}",
                create_options(random)
            )
        }
        15 | 16 => format!(
            "qemu-img compare {}{image} {other}",
            raw_of_flat(random.pick(&["", "-s ", "-q ", "-f raw -F raw ", "-f qcow2 "]), &[image, other])
        ),
        17 | 18 => {
            format!("qemu-img map {output}{}{image}", random.pick(&["", "-s 64k ", "-l 128k ", "-s x ", "-f qcow2 "]))
        }
        19 => format!("qemu-img measure {output}-O {format} {}{image}", create_options(random)),
        20 => format!("qemu-img measure {output}-O {format} --size {size}"),
        21 | 22 => {
            let known = ["", "--shrink ", "--preallocation=metadata ", "--preallocation=full ", "-f raw ", "-f qcow2 "];
            format!("qemu-img resize {quiet}{}{image} {size}", raw_of_flat(random.pick(&known), &[image]))
        }
        23 => format!(
            "qemu-img snapshot {}{image}",
            random.pick(&["-l ", "-c s1 ", "-c s2 ", "-a s1 ", "-d s1 ", "-d nosuch ", "-a 1 ", ""])
        ),
        24 => format!(
            "qemu-img bitmap {}{image} {}",
            random.pick(&[
                "--add ",
                "--remove ",
                "--clear ",
                "--enable ",
                "--disable ",
                "--add -g 4k ",
                "--add -g 3 ",
                ""
            ]),
            random.pick(&["b0", "b1", ""])
        ),
        25 => format!(
            "qemu-img rebase {}{}",
            random.pick(&[
                "-u -b base -F qcow2 ",
                "-b base -F qcow2 ",
                "-b '' ",
                "-u -b '' ",
                "-b nosuch ",
                "-p -b base ",
                "-b flat -F raw "
            ]),
            random.pick(&["top", "new", "copy"])
        ),
        26 => format!(
            "qemu-img commit {}{image}",
            random.pick(&["", "-d ", "-b base ", "-b nosuch ", "-q ", "-r 1M ", "-f qcow2 "])
        ),
        // A refused option leaves in QEMU what those before it have changed.
        27 => format!(
            "cp {image} kept; qemu-img amend {}-f qcow2 {}{image} || {{ code=$?; cp kept {image}; rm -f kept; exit $code; }}; rm kept",
            random.pick(&["", "-q ", "-p "]),
            create_options(random)
        ),
        28 => format!(
            "qemu-img dd {}if={image} of=copy{number} {}",
            random.pick(&["", "-f raw -O raw ", "-O qcow2 ", "-f qcow2 "]),
            random.pick(&["", "bs=4k", "bs=64k count=3", "bs=512 skip=7", "count=1", "bs=x", "skip=-1"])
        ),
        _ => random
            .pick(&[
                "qemu-img nosuch",
                "qemu-img",
                "qemu-img info",
                "qemu-img create",
                "qemu-img info a b",
                "qemu-img check",
                "qemu-img --nosuch",
                "qemu-img map",
                "qemu-img compare base",
                "qemu-img resize base",
                "qemu-img convert base",
            ])
            .to_string(),
    }
}

// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `info --limits`, which qemu-img has since version 11: the expected texts are its own.

use crate::oracle::{Oracle, words};

const FILE: &str = r#"{"request-alignment":1,"min-mem-alignment":1,"opt-mem-alignment":4096,"max-iov":1024}"#;

/// The limits of the top node and of its child, as text of the JSON, without spaces.
fn limits(oracle: &Oracle, line: &str) -> (String, String) {
    let said = oracle.ours(&oracle.work(), &words(&format!("info --limits --output=json {line}")));
    assert_eq!(said.code, Some(0), "{line}: {}", said.err);
    let text: String = said.out.split_whitespace().collect();
    let object = |text: &str| {
        let start = text.find("\"limits\":").expect("limits") + "\"limits\":".len();
        let end = start + text[start..].find('}').expect("an end");
        text[start..=end].to_owned()
    };
    let (child, top) = (text.find("\"info\":").expect("a child"), object(&text));
    (top, object(&text[child..]))
}

#[test]
fn limits_are_those_of_qemu_11() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 plain.qcow2 1M");
    oracle.make("create -q -f qcow2 -o extended_l2=on,cluster_size=128k sub.qcow2 1M");
    oracle.make("create -q -f raw disk.raw 1M");
    let watched = FILE.replace("\"request-alignment\":1", "\"request-alignment\":512");
    let qcow2 = |zeroes: u32, discard: u32| {
        format!(
            "{{\"write-zeroes-alignment\":{zeroes},\"request-alignment\":1,\"min-mem-alignment\":1,\
             \"discard-alignment\":{discard},\"opt-mem-alignment\":4096,\"max-iov\":1024}}"
        )
    };
    let null = r#"{"request-alignment":1,"min-mem-alignment":512,"opt-mem-alignment":4096,"max-iov":1024}"#;
    let faulty = "driver=blkdebug,align=4096,max-transfer=65536,image.driver=file,image.filename=disk.raw";
    let aligned = r#"{"request-alignment":4096,"min-mem-alignment":1,"max-transfer":65536,"opt-mem-alignment":4096,"max-iov":1024}"#;
    for (line, top, child) in [
        ("plain.qcow2", qcow2(65536, 65536).as_str(), FILE),
        ("sub.qcow2", &qcow2(4096, 131_072), FILE),
        ("disk.raw", &watched, FILE),
        ("-f raw disk.raw", FILE, FILE),
        ("-f raw null-co://", null, null),
        (&format!("--image-opts {faulty}"), aligned, FILE),
    ] {
        assert_eq!(limits(&oracle, line), (top.to_owned(), child.to_owned()), "{line}");
    }
    let said = oracle.ours(&oracle.work(), &words("info --limits disk.raw"));
    let expected = "Block limits:\n    request alignment: 512\n    min mem alignment: 1\n    opt mem alignment: 4096\n    \
                    max iov: 1024\nChild node '/file':\n";
    assert!(said.out.contains(expected), "{}", said.out);
    let without = oracle.ours(&oracle.work(), &words("info --output=json disk.raw"));
    assert!(!without.out.contains("limits"), "{}", without.out);
}

// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lists with commas between their items, where `,,` stands for one comma in an item.

/// The text up to the next single comma, with `,,` turned into `,`, and the rest behind that comma.
pub fn next_item(text: &str) -> (String, &str) {
    let mut item = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(',') {
        item.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        match rest.strip_prefix(',') {
            Some(behind) => {
                item.push(',');
                rest = behind;
            }
            None => return (item, rest),
        }
    }
    item.push_str(rest);
    (item, "")
}

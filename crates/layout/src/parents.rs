// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Names of parents as programs of Windows write them, turned into names of files beside the image. A drive, a server
//! or the root of a disk is never followed. The last part of such a name is looked for beside the image.

/// UTF-16 as text, up to the first NUL.
pub fn utf16(bytes: &[u8], is_big_endian: bool) -> String {
    let (pairs, _) = bytes.as_chunks::<2>();
    let units =
        pairs.iter().map(|pair| if is_big_endian { u16::from_be_bytes(*pair) } else { u16::from_le_bytes(*pair) });
    let units: Vec<u16> = units.take_while(|unit| *unit != 0).collect();
    String::from_utf16_lossy(&units)
}

/// A path relative to the image's folder, with slashes; `None` for one that isn't relative, and for one that could be
/// taken for an address.
pub fn relative(path: &str) -> Option<String> {
    let path = path.replace('\\', "/");
    let path = path.strip_prefix("./").unwrap_or(&path);
    let is_name = !path.is_empty() && !path.starts_with('/') && !path.contains([':', '\0']);
    is_name.then(|| path.to_owned())
}

/// The last component of a path of any kind.
pub fn last_component(path: &str) -> Option<String> {
    let last = path.rsplit(['\\', '/']).next()?;
    let is_name = !last.is_empty() && last != "." && last != ".." && !last.contains([':', '\0']);
    is_name.then(|| last.to_owned())
}

/// Where a parent is looked for: by its relative path, else beside the image, under the last part of its name.
pub fn beside(relative_path: Option<&str>, others: &[Option<&str>]) -> Option<String> {
    let named = relative_path.and_then(relative);
    named.or_else(|| others.iter().flatten().find_map(|path| last_component(path)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_windows_lead_to_files_beside_the_image() {
        assert_eq!(beside(Some(".\\a.vhd"), &[]).as_deref(), Some("a.vhd"));
        assert_eq!(beside(Some("..\\base\\a.vhd"), &[Some("C:\\b.vhd")]).as_deref(), Some("../base/a.vhd"));
        assert_eq!(beside(None, &[None, Some("C:\\disks\\b c.vhd")]).as_deref(), Some("b c.vhd"));
        for path in ["C:\\b.vhd", "\\\\server\\share\\b.vhd", "/etc/b.vhd", "nbd:unix:b.vhd", ""] {
            assert_eq!(relative(path), None, "{path}");
        }
        for path in ["", "C:\\", "..", "json:{}", "a/..", "b:stream"] {
            assert_eq!(last_component(path), None, "{path}");
        }
        assert_eq!(utf16(b"a\0b\0\0\0c\0", false), "ab");
        assert_eq!(utf16(b"\0a\0b\0", true), "ab");
    }
}

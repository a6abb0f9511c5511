// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The descriptor of a package (`.ovf`): XML, of which the files, the disks and the machine's parts are read.
//!
//! Elements and attributes count by their names, whatever prefix and version of the namespace they have. There are no
//! entities but XML's own five and characters by number, and no document type.

use crate::limits;
use crate::tar::{plain_name, printable, without_folder};
use cowshed_types::{Error, ErrorKind, Result};
use quick_xml::XmlVersion;
use quick_xml::events::{BytesStart, Event};
use quick_xml::reader::Reader;
use std::collections::BTreeMap;

/// A file in the package's list of files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileReference {
    /// The id by which disks name it.
    pub id: String,
    /// Its name.
    pub href: String,
    /// Its length in bytes, where the package has it.
    pub size: Option<u64>,
    /// It is cut into files of this many bytes, `HREF.000000000` and so on.
    pub chunk_bytes: Option<u64>,
    /// It is stored with gzip.
    pub is_gzip: bool,
}

/// A disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Disk {
    /// The id by which the machine names it.
    pub id: String,
    /// The id of its file; none for an empty disk.
    pub file: Option<String>,
    /// Its length in bytes; none where it depends on a choice at the import.
    pub capacity_bytes: Option<u64>,
    /// The URI of its format.
    pub format: String,
    /// The disk that it is a difference to.
    pub parent: Option<String>,
}

/// A part of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Item {
    /// The fields by their names, such as `ResourceType`.
    pub fields: BTreeMap<String, String>,
    /// An importer that doesn't know it may leave it out.
    pub is_optional: bool,
    /// The number of the machine it belongs to, from 0.
    pub machine: usize,
}

impl Item {
    /// A field's text; empty where it is missing.
    pub fn field(&self, name: &str) -> &str {
        self.fields.get(name).map_or("", String::as_str)
    }

    /// Its quantity; for memory in bytes.
    pub fn quantity(&self) -> Option<u64> {
        let number: u64 = self.field("VirtualQuantity").trim().parse().ok()?;
        let unit = match self.field("AllocationUnits") {
            _ if self.field("ResourceType") != resource::MEMORY => 1,
            unit => unit_bytes(unit)?,
        };
        number.checked_mul(unit)
    }
}

/// The kinds of parts (CIM's `ResourceType`).
pub mod resource {
    /// Processors.
    pub const PROCESSOR: &str = "3";
    /// Memory.
    pub const MEMORY: &str = "4";
    /// A network card.
    pub const ETHERNET: &str = "10";
    /// A disk.
    pub const DISK: &str = "17";
    /// A sound card.
    pub const SOUND: &str = "35";
}

/// A machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// Its identifier.
    pub id: String,
    /// Its name.
    pub name: Option<String>,
    /// The families of hardware that it runs on, such as `vmx-10`.
    pub families: Vec<String>,
    /// It has a section of hardware.
    pub has_hardware: bool,
    /// Its firmware, where VMware's key has it.
    pub firmware: Option<String>,
    /// Keys that only VMware's programs have, and whether one without them may go on.
    pub extra_keys: Vec<(String, bool)>,
}

/// The descriptor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Envelope {
    /// The files.
    pub files: Vec<FileReference>,
    /// The disks.
    pub disks: Vec<Disk>,
    /// The machines: several in a collection.
    pub machines: Vec<Machine>,
    /// Their parts.
    pub items: Vec<Item>,
    /// The namespace of the envelope; empty where it has none.
    pub namespace: String,
}

/// The namespaces that importers know: OVF 1 and 2, and VMware's OVF 0.9.
const NAMESPACES: [&str; 3] = [
    "http://schemas.dmtf.org/ovf/envelope/1",
    "http://schemas.dmtf.org/ovf/envelope/2",
    "http://www.vmware.com/schema/ovf/1/envelope",
];

impl Envelope {
    /// True where the envelope has a namespace of OVF.
    pub fn is_of_ovf(&self) -> bool {
        NAMESPACES.contains(&self.namespace.as_str())
    }

    /// Reads a descriptor.
    ///
    /// # Errors
    /// For text that is no OVF envelope, is damaged, or asks for more than this reads.
    pub fn parse(bytes: &[u8]) -> Result<Envelope> {
        let text = std::str::from_utf8(bytes).map_err(|_| wrong("it is no UTF-8"))?;
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        // ovftool pads with spaces or NULs behind the end.
        let text = text.trim_end_matches(['\0', ' ', '\r', '\n']);
        if let Some((at, character)) = text.char_indices().find(|(_, character)| !is_of_xml(*character)) {
            return Err(no_character(character, Some(at)));
        }
        let mut reader = Reader::from_str(text);
        reader.config_mut().check_end_names = true;
        reader.config_mut().check_comments = true;
        let mut walk = Walk::default();
        loop {
            match reader.read_event().map_err(|error| wrong(&printable(&error.to_string())))? {
                Event::Start(start) => walk.open(&start)?,
                Event::Empty(start) => {
                    walk.open(&start)?;
                    walk.close()?;
                }
                Event::End(_) => walk.close()?,
                Event::Text(text) => walk.text.push_str(&text.xml10_content()),
                Event::CData(text) => walk.text.push_str(&text.xml10_content()),
                Event::GeneralRef(name) => {
                    let character = match name.resolve_char_ref() {
                        Ok(Some(character)) => Some(character),
                        Ok(None) => predefined(&name.into_inner()),
                        Err(_) => None,
                    };
                    let character = character.ok_or_else(|| wrong("an entity that XML doesn't have"))?;
                    if !is_of_xml(character) {
                        return Err(no_character(character, None));
                    }
                    walk.text.push(character);
                }
                Event::DocType(_) => return Err(wrong("it has a document type")),
                Event::Decl(_) | Event::PI(_) | Event::Comment(_) => {}
                Event::Eof => break,
            }
        }
        if !walk.path.is_empty() {
            return Err(wrong("it is cut off"));
        }
        if !walk.is_envelope {
            return Err(wrong("there is no Envelope"));
        }
        walk.envelope.check()?;
        Ok(walk.envelope)
    }

    /// The file with this id.
    pub fn file(&self, id: &str) -> Option<&FileReference> {
        self.files.iter().find(|file| file.id == id)
    }

    /// The sum of a kind's quantities; for memory in bytes. The first machine counts.
    pub fn quantity(&self, kind: &str) -> Option<u64> {
        let items = self.items.iter().filter(|item| item.machine == 0 && item.field("ResourceType") == kind);
        items
            .map(Item::quantity)
            .try_fold(None, |sum, number| Some(Some(sum.unwrap_or(0u64).checked_add(number?)?)))
            .flatten()
    }

    /// Takes the names of files as URIs have them, with `%20` for a space, where no file has the undecoded name.
    pub(crate) fn decode_names(&mut self, has_file: impl Fn(&str) -> bool) {
        let first = |file: &FileReference, href: &str| match file.chunk_bytes {
            Some(_) => has_file(&format!("{href}.000000000")),
            None => has_file(href),
        };
        for file in &mut self.files {
            let Some(decoded) = decoded(&file.href).filter(|name| plain_name(name).is_ok()) else { continue };
            if !first(file, &file.href) && first(file, &decoded) {
                file.href = decoded;
            }
        }
    }

    /// Refuses a descriptor with faults that make it useless.
    fn check(&self) -> Result<()> {
        for (index, file) in self.files.iter().enumerate() {
            // Disks on servers aren't opened: a name with a scheme is none of the package's files.
            plain_name(&file.href)?;
            if self.files[..index].iter().any(|other| other.id == file.id) {
                return Err(wrong(&format!("two files have the id '{}'", printable(&file.id))));
            }
            if file.chunk_bytes == Some(0) || file.chunk_bytes.is_some() && file.size.is_none() {
                return Err(wrong(&format!("the pieces of '{}' have no length", printable(&file.href))));
            }
        }
        for (index, disk) in self.disks.iter().enumerate() {
            if self.disks[..index].iter().any(|other| other.id == disk.id) {
                return Err(wrong(&format!("two disks have the id '{}'", printable(&disk.id))));
            }
            if let Some(file) = disk.file.as_deref().filter(|file| self.file(file).is_none()) {
                let (disk, file) = (printable(&disk.id), printable(file));
                return Err(wrong(&format!("disk '{disk}' is in the file '{file}', which isn't declared")));
            }
        }
        Ok(())
    }
}

/// The number of bytes that a unit stands for: `byte * 2^30`, `GigaBytes` of OVF 0.9, nothing.
pub fn unit_bytes(unit: &str) -> Option<u64> {
    let unit = unit.trim();
    if unit.is_empty() || unit.eq_ignore_ascii_case("byte") || unit.eq_ignore_ascii_case("bytes") {
        return Some(1);
    }
    for (word, shift) in [("kilobytes", 10), ("megabytes", 20), ("gigabytes", 30), ("terabytes", 40)] {
        if unit.eq_ignore_ascii_case(word) {
            return Some(1 << shift);
        }
    }
    let factor: String = unit.strip_prefix("byte")?.trim_start().strip_prefix('*')?.split_whitespace().collect();
    match factor.split_once('^') {
        Some((base, exponent)) => base.parse::<u64>().ok()?.checked_pow(exponent.parse().ok()?),
        None => factor.parse().ok(),
    }
}

/// True for a character that a text of XML 1.0 may have.
fn is_of_xml(character: char) -> bool {
    matches!(character, '\t' | '\n' | '\r' | '\u{20}'..='\u{fffd}' | '\u{10000}'..)
}

fn no_character(character: char, at: Option<usize>) -> Error {
    let place = at.map_or_else(String::new, |at| format!(" (at byte {at})"));
    wrong(&format!("a character that XML doesn't have, U+{:04X}{place}", u32::from(character)))
}

/// The text of a URI whose bytes may be written as `%20`; none where they aren't.
fn decoded(text: &str) -> Option<String> {
    let mut parts = text.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        let digits = part.get(..2).filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()))?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        bytes.extend_from_slice(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).ok().filter(|decoded| decoded != text)
}

fn predefined(name: &str) -> Option<char> {
    let known = [("lt", '<'), ("gt", '>'), ("amp", '&'), ("apos", '\''), ("quot", '"')];
    known.iter().find(|(known, _)| *known == name).map(|(_, character)| *character)
}

#[derive(Default)]
struct Walk {
    envelope: Envelope,
    /// The open elements, by their names.
    path: Vec<String>,
    elements: usize,
    is_envelope: bool,
    text: String,
    /// The `Item` that is open.
    item: Option<Item>,
}

impl Walk {
    fn open(&mut self, start: &BytesStart<'_>) -> Result<()> {
        self.elements += 1;
        if self.elements > limits::ELEMENTS || self.path.len() >= limits::DEPTH {
            return Err(Error::new(ErrorKind::Limit, "the descriptor has too many elements, or too deep ones"));
        }
        let name = local(start.name().0);
        let parent = self.path.last().map(String::as_str).unwrap_or_default();
        self.text.clear();
        if self.path.is_empty() {
            if self.is_envelope || name != "Envelope" {
                return Err(wrong("its root is no Envelope"));
            }
            self.is_envelope = true;
            self.envelope.namespace = namespace(start)?;
        }
        match (parent, name.as_str()) {
            ("References", "File") => {
                let file = file_of(&attributes(start)?)?;
                bounded(&self.envelope.files)?;
                self.envelope.files.push(file);
            }
            // "Section" with a type is OVF 0.9's way.
            ("DiskSection" | "Section", "Disk") => {
                let disk = disk_of(attributes(start)?)?;
                bounded(&self.envelope.disks)?;
                self.envelope.disks.push(disk);
            }
            (_, "VirtualSystem") => {
                let id = attributes(start)?.remove("id").unwrap_or_default();
                bounded(&self.envelope.machines)?;
                self.envelope.machines.push(Machine { id, ..Machine::default() });
            }
            (_, "VirtualHardwareSection") => {
                if let Some(machine) = self.envelope.machines.last_mut() {
                    machine.has_hardware = true;
                }
            }
            ("VirtualHardwareSection" | "Section", "Item" | "StorageItem" | "EthernetPortItem") => {
                let is_optional = attributes(start)?.get("required").is_some_and(|value| value == "false");
                let machine = self.envelope.machines.len().saturating_sub(1);
                self.item = Some(Item { is_optional, machine, ..Item::default() });
            }
            ("VirtualHardwareSection", "Config" | "ExtraConfig") => self.config(&name, &attributes(start)?),
            _ => {}
        }
        self.path.push(name);
        Ok(())
    }

    fn config(&mut self, element: &str, attributes: &BTreeMap<String, String>) {
        let Some(machine) = self.envelope.machines.last_mut() else { return };
        let key = attributes.get("key").map_or("", String::as_str);
        if element == "ExtraConfig" {
            let is_optional = attributes.get("required").is_some_and(|value| value == "false");
            machine.extra_keys.push((key.to_owned(), is_optional));
        } else if key == "firmware" {
            machine.firmware = attributes.get("value").cloned();
        }
    }

    fn close(&mut self) -> Result<()> {
        let Some(name) = self.path.pop() else { return Err(wrong("an element ends that didn't begin")) };
        let text = std::mem::take(&mut self.text).trim().to_owned();
        let parent = self.path.last().map(String::as_str).unwrap_or_default();
        match (parent, name.as_str()) {
            (_, "Item" | "StorageItem" | "EthernetPortItem") if parent != "Item" => {
                if let Some(item) = self.item.take() {
                    bounded(&self.envelope.items)?;
                    self.envelope.items.push(item);
                }
            }
            ("Item" | "StorageItem" | "EthernetPortItem", _) => {
                if let Some(item) = &mut self.item {
                    item.fields.entry(name).or_insert(text);
                }
            }
            ("VirtualSystem", "Name") => {
                if let Some(machine) = self.envelope.machines.last_mut() {
                    machine.name.get_or_insert(text);
                }
            }
            ("System", "VirtualSystemType") => {
                if let Some(machine) = self.envelope.machines.last_mut() {
                    machine.families.extend(text.split([' ', ',']).filter(|word| !word.is_empty()).map(str::to_owned));
                }
            }
            _ => {}
        }
        Ok(())
    }
}

fn bounded<T>(list: &[T]) -> Result<()> {
    match list.len() < limits::MEMBERS {
        true => Ok(()),
        false => {
            Err(Error::new(ErrorKind::Limit, format!("more than {} of a kind in the descriptor", limits::MEMBERS)))
        }
    }
}

fn local(name: &str) -> String {
    name.rsplit_once(':').map_or(name, |(_, local)| local).to_owned()
}

/// The namespace of an element that declares its own; empty where it doesn't.
fn namespace(start: &BytesStart<'_>) -> Result<String> {
    let name = start.name();
    let wanted = match name.0.rsplit_once(':') {
        Some((prefix, _)) => format!("xmlns:{prefix}"),
        None => "xmlns".to_owned(),
    };
    for attribute in start.attributes() {
        let attribute = attribute.map_err(|error| wrong(&printable(&error.to_string())))?;
        if attribute.key.0 == wanted {
            let value = attribute.normalized_value(XmlVersion::Explicit1_0);
            return value.map(|value| value.into_owned()).map_err(|error| wrong(&printable(&error.to_string())));
        }
    }
    Ok(String::new())
}

/// The attributes of an element by their names without prefix.
fn attributes(start: &BytesStart<'_>) -> Result<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    for attribute in start.attributes() {
        let attribute = attribute.map_err(|error| wrong(&printable(&error.to_string())))?;
        let name = attribute.key.0;
        if name == "xmlns" || name.starts_with("xmlns:") {
            continue;
        }
        let value = attribute.normalized_value(XmlVersion::Explicit1_0);
        let value = value.map_err(|error| wrong(&printable(&error.to_string())))?;
        if let Some(character) = value.chars().find(|character| !is_of_xml(*character)) {
            return Err(no_character(character, None));
        }
        if found.insert(local(name), value.into_owned()).is_some() {
            return Err(wrong(&format!("two attributes '{}'", printable(&local(name)))));
        }
    }
    Ok(found)
}

fn file_of(attributes: &BTreeMap<String, String>) -> Result<FileReference> {
    let number = |name: &str| match attributes.get(name) {
        None => Ok(None),
        Some(text) => {
            let number = text.trim().parse::<u64>().ok().filter(|&number| i64::try_from(number).is_ok());
            number.map(Some).ok_or_else(|| wrong(&format!("'{name}' of a file is no length: '{}'", printable(text))))
        }
    };
    let text = |name: &str| attributes.get(name).cloned().unwrap_or_default();
    let is_gzip = match text("compression").as_str() {
        "" | "identity" => false,
        "gzip" => true,
        other => {
            let message = format!("the compression '{}' of a file isn't known", printable(other));
            return Err(Error::unsupported(message));
        }
    };
    let href = text("href");
    let href = without_folder(&href).to_owned();
    Ok(FileReference { id: text("id"), href, size: number("size")?, chunk_bytes: number("chunkSize")?, is_gzip })
}

fn disk_of(mut attributes: BTreeMap<String, String>) -> Result<Disk> {
    let mut take = |name: &str| attributes.remove(name);
    let capacity = take("capacity").unwrap_or_default();
    let unit = take("capacityAllocationUnits").unwrap_or_default();
    // `${name}` stands for a value that the user chooses at the import.
    let capacity_bytes = match capacity.trim() {
        variable if variable.starts_with("${") => None,
        number => {
            let number = number.parse::<u64>().ok().zip(unit_bytes(&unit));
            let bytes = number.and_then(|(number, unit)| number.checked_mul(unit));
            let bytes = bytes.filter(|&bytes| i64::try_from(bytes).is_ok());
            Some(bytes.ok_or_else(|| {
                wrong(&format!("the capacity '{}' ('{}') of a disk", printable(&capacity), printable(&unit)))
            })?)
        }
    };
    Ok(Disk {
        id: take("diskId").unwrap_or_default(),
        file: take("fileRef").filter(|file| !file.is_empty()),
        capacity_bytes,
        format: take("format").unwrap_or_default(),
        parent: take("parentRef").filter(|parent| !parent.is_empty()),
    })
}

fn wrong(what: &str) -> Error {
    Error::new(ErrorKind::InvalidImage, format!("the OVF descriptor is damaged: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = r#"<?xml version="1.0" encoding="UTF-8"?>
<!-- a comment -->
<ovf:Envelope xmlns:ovf="http://schemas.dmtf.org/ovf/envelope/1" xmlns="http://schemas.dmtf.org/ovf/envelope/1">
  <References><File ovf:id="file1" ovf:href="a&amp;b.vmdk" ovf:size="1024"/></References>
  <DiskSection><Info>x</Info>
    <Disk ovf:diskId="d1" ovf:fileRef="file1" ovf:capacity="3" ovf:capacityAllocationUnits="byte * 2^20" ovf:format="f#s"/>
    <Disk ovf:diskId="empty" ovf:capacity="1073741824"/>
  </DiskSection>
  <VirtualSystem ovf:id="vm"><Name>A &lt;machine&gt; &#65;</Name>
    <VirtualHardwareSection><System><vssd:VirtualSystemType>vmx-09 vmx-10</vssd:VirtualSystemType></System>
      <Item><rasd:ResourceType>3</rasd:ResourceType><rasd:VirtualQuantity>2</rasd:VirtualQuantity></Item>
      <Item ovf:required="false"><rasd:AllocationUnits>MegaBytes</rasd:AllocationUnits>
        <rasd:ResourceType>4</rasd:ResourceType><rasd:VirtualQuantity>512</rasd:VirtualQuantity></Item>
      <vmw:Config ovf:required="false" vmw:key="firmware" vmw:value="efi"/>
      <vmw:ExtraConfig vmw:key="x.y" vmw:value="1"/>
    </VirtualHardwareSection>
  </VirtualSystem>
</ovf:Envelope>"#;

    #[test]
    fn a_descriptor_is_read() {
        let envelope = Envelope::parse(SMALL.as_bytes()).unwrap();
        assert_eq!(envelope.file("file1").map(|file| (file.href.as_str(), file.size)), Some(("a&b.vmdk", Some(1024))));
        let disk = &envelope.disks[0];
        assert_eq!(
            (disk.capacity_bytes, disk.file.as_deref(), disk.format.as_str()),
            (Some(3 << 20), Some("file1"), "f#s")
        );
        assert_eq!((envelope.disks[1].capacity_bytes, &envelope.disks[1].file), (Some(1 << 30), &None));
        let machine = &envelope.machines[0];
        assert_eq!((machine.name.as_deref(), machine.has_hardware), (Some("A <machine> A"), true));
        assert_eq!((machine.families.len(), machine.firmware.as_deref()), (2, Some("efi")));
        assert_eq!(machine.extra_keys, [("x.y".to_owned(), false)]);
        assert_eq!(
            (envelope.quantity(resource::PROCESSOR), envelope.quantity(resource::MEMORY)),
            (Some(2), Some(512 << 20))
        );
        assert!(envelope.items[1].is_optional);
        let padded = format!("\u{feff}{SMALL}   \n\0\0\0");
        assert_eq!(Envelope::parse(padded.as_bytes()).unwrap(), envelope);
    }

    #[test]
    fn names_of_uris_are_decoded() {
        for (text, name) in [
            ("a%20b", Some("a b")),
            ("%41%c3%a4", Some("A\u{e4}")),
            ("50%25", Some("50%")),
            ("a", None),
            ("50%", None),
            ("%4", None),
            ("%+4a", None),
            ("%ff", None),
            ("%\u{e4}", None),
        ] {
            assert_eq!(decoded(text).as_deref(), name, "{text}");
        }
    }

    #[test]
    fn units_are_numbers_of_bytes() {
        for (unit, bytes) in
            [("byte * 2^30", 1 << 30), ("byte*2^0", 1), ("byte * 1024", 1024), ("", 1), ("GigaBytes", 1 << 30)]
        {
            assert_eq!(unit_bytes(unit), Some(bytes), "{unit}");
        }
        for unit in ["byte * 2^64", "byte * 10^99", "furlong", "byte +", "byte * 2^-1"] {
            assert_eq!(unit_bytes(unit), None, "{unit}");
        }
    }

    #[track_caller]
    fn refused(text: &str, why: &str) {
        let error = Envelope::parse(text.as_bytes()).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }

    #[test]
    fn hostile_descriptors_are_refused() {
        let with = |from: &str, to: &str| SMALL.replacen(from, to, 1);
        for href in ["../x", "/etc/passwd", "http://host/x", "a/b", "", "..", "a&#x7f;[31m"] {
            refused(&with("a&amp;b.vmdk", href), "no name of a file");
        }
        refused(&with("<ovf:Envelope", "<!DOCTYPE x [<!ENTITY a \"b\">]><ovf:Envelope"), "document type");
        refused(&with("&lt;machine", "&a;machine"), "entity");
        refused(&with("size=\"1024\"", "size=\"-1\""), "no length");
        refused(&with("size=\"1024\"", "size=\"9223372036854775808\""), "no length");
        refused(&with("size=\"1024\"", "size=\"1\" ovf:chunkSize=\"0\""), "no length");
        refused(&with("ovf:size=\"1024\"", "ovf:chunkSize=\"512\""), "no length");
        refused(&with("size=\"1024\"", "size=\"1\" ovf:compression=\"rot13\""), "rot13");
        refused(&with("capacity=\"3\"", "capacity=\"9223372036854775807\""), "capacity");
        refused(&with("byte * 2^20", "furlong"), "capacity");
        refused(&with("fileRef=\"file1\"", "fileRef=\"file9\""), "isn't declared");
        refused(&with("diskId=\"empty\"", "diskId=\"d1\""), "two disks");
        refused(&with("ovf:id=\"file1\"", "ovf:id=\"file1\" x:id=\"file2\""), "two attributes");
        refused(&with("</References>", ""), "damaged");
        refused("", "no Envelope");
        refused("<x/>", "no Envelope");
        refused(&SMALL[..SMALL.len() - 20], "damaged");
        refused(&format!("{SMALL}<Envelope/>"), "no Envelope");
        assert!(Envelope::parse(&[0xff, 0xfe]).is_err());
    }

    #[test]
    fn text_that_is_no_xml_is_refused() {
        let with = |from: &str, to: &str| SMALL.replacen(from, to, 1);
        refused(&with("a comment", "a -- comment"), "damaged");
        refused(&with("A &lt;", "A \u{1}"), "XML doesn't have, U+0001 (at byte ");
        refused(&with("<Info>x", "<Info>\0"), "U+0000");
        refused(&with("&#65;", "&#1;"), "U+0001");
        refused(&with("&#65;", "&#xfffe;"), "U+FFFE");
        refused(&with("file1", "&#x1b;"), "U+001B");
    }

    #[test]
    fn the_namespace_is_the_one_of_the_root() {
        let parsed = |text: &str| Envelope::parse(text.as_bytes()).unwrap();
        assert!(parsed(SMALL).is_of_ovf());
        assert!(parsed("<Envelope xmlns='http://www.vmware.com/schema/ovf/1/envelope'/>").is_of_ovf());
        for text in
            ["<Envelope/>", "<Envelope xmlns='x'/>", "<o:Envelope xmlns='http://schemas.dmtf.org/ovf/envelope/1'/>"]
        {
            assert!(!parsed(text).is_of_ovf(), "{text}");
        }
    }

    #[test]
    fn depth_and_counts_are_bounded() {
        let deep = format!("<Envelope>{}", "<a>".repeat(1000));
        assert_eq!(Envelope::parse(deep.as_bytes()).unwrap_err().kind(), ErrorKind::Limit);
        let many = format!("<Envelope>{}</Envelope>", "<a/>".repeat(limits::ELEMENTS + 1));
        assert_eq!(Envelope::parse(many.as_bytes()).unwrap_err().kind(), ErrorKind::Limit);
        let disks = "<Disk diskId='x' capacity='1'/>".repeat(limits::MEMBERS + 1);
        let many = format!("<Envelope><DiskSection>{disks}</DiskSection></Envelope>");
        assert_eq!(Envelope::parse(many.as_bytes()).unwrap_err().kind(), ErrorKind::Limit);
    }
}

// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The descriptor of a new package: elements that VMware's and VirtualBox's importers take, and nothing that one of
//! them rejects.

use crate::tar::{plain_name, printable};
use cowshed_types::{Error, Result};
use std::fmt::Write;

/// The programs that are to import a package.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Importer {
    /// ESXi, vCenter, Workstation, Fusion.
    Vmware,
    /// VirtualBox.
    VirtualBox,
    /// Any of them.
    #[default]
    Both,
}

impl Importer {
    /// VMware's programs are to take it.
    pub fn has_vmware(self) -> bool {
        self != Importer::VirtualBox
    }

    /// VirtualBox is to take it.
    pub fn has_virtualbox(self) -> bool {
        self != Importer::Vmware
    }

    /// The family of hardware. VirtualBox takes VMware's families; VMware rejects VirtualBox's.
    fn family(self) -> &'static str {
        match self {
            Importer::Vmware | Importer::Both => "vmx-10",
            Importer::VirtualBox => "virtualbox-2.2",
        }
    }
}

/// The firmware of the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Firmware {
    /// The PC's.
    #[default]
    Bios,
    /// UEFI.
    Efi,
}

/// A disk of the new package.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewDisk {
    /// Its file in the package.
    pub name: String,
    /// The length of that.
    pub file_bytes: u64,
    /// The length of the disk.
    pub capacity_bytes: u64,
    /// Bytes of the disk that aren't zeroes, as far as known.
    pub populated_bytes: Option<u64>,
}

/// The new machine.
#[derive(Clone, Debug)]
pub struct NewMachine {
    /// Its name.
    pub name: String,
    /// Number of processors.
    pub cpus: u32,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Its firmware.
    pub firmware: Firmware,
    /// A network card for each of these networks.
    pub networks: Vec<String>,
    /// The importers.
    pub importer: Importer,
    /// The disks, in their order at the controller.
    pub disks: Vec<NewDisk>,
}

/// Disks at one controller: of LSI's numbers 0 to 15 the seventh is its own.
pub const MOST_DISKS: usize = 15;

/// The most network cards of a machine in VMware's programs.
pub const MOST_NETWORKS: usize = 10;

/// Processors of a machine: those of the family `vmx-10`, and of VirtualBox.
pub const MOST_CPUS: u32 = 64;

/// VMware's programs take no other memory than a multiple of this.
pub const MEMORY_UNIT_BYTES: u64 = 4 << 20;

/// Memory of a machine in MiB.
pub const MOST_MEMORY_MIB: u64 = 1 << 20;

const VMDK_STREAM: &str = "http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized";

impl NewMachine {
    /// The text of the descriptor.
    ///
    /// # Errors
    /// For a machine that importers reject.
    pub fn descriptor(&self) -> Result<String> {
        self.check()?;
        let mut text = String::new();
        text.push_str("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
        text.push_str(ENVELOPE);
        self.push_disks(&mut text);
        self.push_networks(&mut text);
        let name = escape(&self.name);
        let _ = write!(
            text,
            "  <VirtualSystem ovf:id=\"{name}\">
    <Info>A virtual machine</Info>
    <Name>{name}</Name>
    <OperatingSystemSection ovf:id=\"102\"{}>
      <Info>The kind of installed guest operating system</Info>
      <Description>Other (64-bit)</Description>
    </OperatingSystemSection>
    <VirtualHardwareSection>
      <Info>Virtual hardware requirements</Info>
      <System>
        <vssd:ElementName>Virtual Hardware Family</vssd:ElementName>
        <vssd:InstanceID>0</vssd:InstanceID>
        <vssd:VirtualSystemIdentifier>{name}</vssd:VirtualSystemIdentifier>
        <vssd:VirtualSystemType>{}</vssd:VirtualSystemType>
      </System>
",
            if self.importer.has_vmware() { " vmw:osType=\"otherGuest64\"" } else { "" },
            self.importer.family(),
        );
        self.push_items(&mut text);
        if self.firmware == Firmware::Efi && self.importer.has_vmware() {
            text.push_str("      <vmw:Config ovf:required=\"false\" vmw:key=\"firmware\" vmw:value=\"efi\"/>\n");
        }
        text.push_str("    </VirtualHardwareSection>\n  </VirtualSystem>\n</Envelope>\n");
        Ok(text)
    }

    fn check(&self) -> Result<()> {
        let refuse = |message: String| Err(Error::invalid_argument(message));
        let is_text = |text: &str| !text.is_empty() && !text.contains(|c: char| c.is_control() || is_no_xml(c));
        if !is_text(&self.name) || self.name.len() > 80 {
            return refuse("a machine's name has 1 to 80 bytes, and no control characters".to_owned());
        }
        if self.cpus == 0 || self.memory_mib == 0 {
            return refuse("a machine has at least one processor and 1 MiB of memory".to_owned());
        }
        if self.cpus > MOST_CPUS || self.memory_mib > MOST_MEMORY_MIB {
            return refuse(format!("a machine has up to {MOST_CPUS} processors and 1 TiB of memory"));
        }
        if self.importer.has_vmware() && !(self.memory_mib << 20).is_multiple_of(MEMORY_UNIT_BYTES) {
            return refuse("VMware's programs take memory in multiples of 4 MiB".to_owned());
        }
        if self.firmware == Firmware::Efi && self.importer == Importer::VirtualBox {
            let message =
                "OVF has no word for the firmware that VirtualBox reads: import the machine, and turn EFI on there";
            return Err(Error::unsupported(message));
        }
        if self.disks.len() > MOST_DISKS || self.networks.len() > MOST_NETWORKS {
            return refuse(format!("a machine has up to {MOST_DISKS} disks and {MOST_NETWORKS} networks"));
        }
        if let Some(name) = self.networks.iter().find(|name| !is_text(name)) {
            return refuse(format!("'{}' is no name of a network", name.escape_debug()));
        }
        for (index, disk) in self.disks.iter().enumerate() {
            plain_name(&disk.name)?;
            if file_name(&disk.name) != disk.name {
                return refuse(format!("'{}' is no name that stands for itself in a URI", printable(&disk.name)));
            }
            if disk.capacity_bytes == 0 || !disk.capacity_bytes.is_multiple_of(512) {
                return refuse(format!("disk '{}' has no whole number of sectors", disk.name));
            }
            if self.disks[..index].iter().any(|other| other.name == disk.name) {
                return refuse(format!("two disks have the name '{}'", disk.name));
            }
        }
        Ok(())
    }

    fn push_disks(&self, text: &mut String) {
        text.push_str("  <References>\n");
        for (number, disk) in (1..).zip(&self.disks) {
            let NewDisk { name, file_bytes, .. } = disk;
            let name = escape(name);
            let _ = writeln!(text, "    <File ovf:href=\"{name}\" ovf:id=\"file{number}\" ovf:size=\"{file_bytes}\"/>");
        }
        text.push_str("  </References>\n  <DiskSection>\n    <Info>Virtual disks</Info>\n");
        for (number, disk) in (1..).zip(&self.disks) {
            let populated = disk.populated_bytes.map(|bytes| format!(" ovf:populatedSize=\"{bytes}\""));
            let _ = writeln!(
                text,
                "    <Disk ovf:capacity=\"{}\" ovf:capacityAllocationUnits=\"byte\" ovf:diskId=\"vmdisk{number}\" \
                 ovf:fileRef=\"file{number}\" ovf:format=\"{VMDK_STREAM}\"{}/>",
                disk.capacity_bytes,
                populated.unwrap_or_default(),
            );
        }
        text.push_str("  </DiskSection>\n");
    }

    fn push_networks(&self, text: &mut String) {
        text.push_str("  <NetworkSection>\n    <Info>The networks</Info>\n");
        for (index, name) in self.networks.iter().enumerate() {
            if self.networks[..index].contains(name) {
                continue;
            }
            let name = escape(name);
            let _ = write!(
                text,
                "    <Network ovf:name=\"{name}\">\n      <Description>{name}</Description>\n    </Network>\n"
            );
        }
        text.push_str("  </NetworkSection>\n");
    }

    fn push_items(&self, text: &mut String) {
        let (cpus, memory) = (self.cpus.to_string(), self.memory_mib.to_string());
        item(
            text,
            &[
                ("AllocationUnits", "hertz * 10^6"),
                ("Description", "Number of virtual CPUs"),
                ("ElementName", &format!("{cpus} virtual CPUs")),
                ("InstanceID", "1"),
                ("ResourceType", "3"),
                ("VirtualQuantity", &cpus),
            ],
        );
        item(
            text,
            &[
                ("AllocationUnits", "byte * 2^20"),
                ("Description", "Memory size"),
                ("ElementName", &format!("{memory} MB of memory")),
                ("InstanceID", "2"),
                ("ResourceType", "4"),
                ("VirtualQuantity", &memory),
            ],
        );
        // A controller that both have and whose drivers guests bring along.
        let (kind, subtype, name) = match self.importer {
            Importer::VirtualBox => ("20", "AHCI", "SATA controller 0"),
            Importer::Vmware | Importer::Both => ("6", "lsilogic", "SCSI controller 0"),
        };
        item(
            text,
            &[
                ("Address", "0"),
                ("Description", "Disk controller"),
                ("ElementName", name),
                ("InstanceID", "3"),
                ("ResourceSubType", subtype),
                ("ResourceType", kind),
            ],
        );
        let mut instance = 4;
        for (index, _) in self.disks.iter().enumerate() {
            // The seventh target of a SCSI bus is the controller.
            let target = if kind == "6" && index >= 7 { index + 1 } else { index };
            item(
                text,
                &[
                    ("AddressOnParent", &target.to_string()),
                    ("ElementName", &format!("disk{}", index + 1)),
                    ("HostResource", &format!("ovf:/disk/vmdisk{}", index + 1)),
                    ("InstanceID", &instance.to_string()),
                    ("Parent", "3"),
                    ("ResourceType", "17"),
                ],
            );
            instance += 1;
        }
        for (index, network) in self.networks.iter().enumerate() {
            item(
                text,
                &[
                    // VMware counts the slots of network cards from 7.
                    ("AddressOnParent", &(7 + index).to_string()),
                    ("AutomaticAllocation", "true"),
                    ("Connection", network),
                    ("Description", &format!("E1000 ethernet adapter on \"{network}\"")),
                    ("ElementName", &format!("ethernet{index}")),
                    ("InstanceID", &instance.to_string()),
                    ("ResourceSubType", "E1000"),
                    ("ResourceType", "10"),
                ],
            );
            instance += 1;
        }
    }
}

/// A name for a file of a package: the same as a part of a URI, which descriptors name files by, decoded or not.
pub fn file_name(name: &str) -> String {
    let stands_for_itself = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_' | '~');
    name.chars().map(|c| if stands_for_itself(c) { c } else { '_' }).collect()
}

const ENVELOPE: &str = "<Envelope xmlns=\"http://schemas.dmtf.org/ovf/envelope/1\" \
xmlns:ovf=\"http://schemas.dmtf.org/ovf/envelope/1\" \
xmlns:rasd=\"http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData\" \
xmlns:vmw=\"http://www.vmware.com/schema/ovf\" \
xmlns:vssd=\"http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_VirtualSystemSettingData\" \
xmlns:xsi=\"http://www.w3.org/2001/XMLSchema-instance\">
";

/// An `Item`: its fields have the order of their names, as in the schema.
fn item(text: &mut String, fields: &[(&str, &str)]) {
    debug_assert!(fields.is_sorted_by_key(|(name, _)| *name));
    text.push_str("      <Item>\n");
    for (name, value) in fields {
        let _ = writeln!(text, "        <rasd:{name}>{}</rasd:{name}>", escape(value));
    }
    text.push_str("      </Item>\n");
}

/// Characters that XML 1.0 can't have, not even by number.
fn is_no_xml(c: char) -> bool {
    matches!(c, '\u{fffe}' | '\u{ffff}')
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&apos;"),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::envelope::{Envelope, resource};

    fn machine() -> NewMachine {
        let disk = |name: &str| NewDisk {
            name: name.to_owned(),
            file_bytes: 4096,
            capacity_bytes: 1 << 30,
            populated_bytes: Some(1 << 20),
        };
        NewMachine {
            name: "a <b> & \"c\"".to_owned(),
            cpus: 2,
            memory_mib: 1024,
            firmware: Firmware::Efi,
            networks: vec!["VM Network".to_owned(), "VM Network".to_owned()],
            importer: Importer::Both,
            disks: vec![disk("a.vmdk"), disk("b.vmdk")],
        }
    }

    #[test]
    fn a_new_descriptor_is_read_as_it_was_meant() {
        let machine = machine();
        let envelope = Envelope::parse(machine.descriptor().unwrap().as_bytes()).unwrap();
        let read = &envelope.machines[0];
        assert_eq!((read.name.as_deref(), read.firmware.as_deref()), (Some(machine.name.as_str()), Some("efi")));
        assert_eq!(envelope.quantity(resource::PROCESSOR), Some(2));
        assert_eq!(envelope.quantity(resource::MEMORY), Some(1 << 30));
        let disks: Vec<_> = envelope.disks.iter().map(|disk| (disk.capacity_bytes, disk.file.as_deref())).collect();
        assert_eq!(disks, [(Some(1 << 30), Some("file1")), (Some(1 << 30), Some("file2"))]);
        let cards = envelope.items.iter().filter(|item| item.field("ResourceType") == resource::ETHERNET);
        assert_eq!(cards.count(), 2);
    }

    #[test]
    fn instances_and_places_are_used_once() {
        let mut machine = machine();
        machine.disks =
            (0..MOST_DISKS).map(|n| NewDisk { name: format!("{n}.vmdk"), ..machine.disks[0].clone() }).collect();
        let envelope = Envelope::parse(machine.descriptor().unwrap().as_bytes()).unwrap();
        let mut seen = std::collections::HashSet::new();
        assert!(envelope.items.iter().all(|item| seen.insert(item.field("InstanceID").to_owned())));
        let disks = envelope.items.iter().filter(|item| item.field("ResourceType") == resource::DISK);
        let places: Vec<&str> = disks.map(|item| item.field("AddressOnParent")).collect();
        assert!(places.len() == MOST_DISKS && !places.contains(&"7") && places.contains(&"15"), "{places:?}");
    }

    #[test]
    fn machines_that_importers_reject_are_refused() {
        let with = |change: fn(&mut NewMachine)| {
            let mut machine = machine();
            change(&mut machine);
            machine.descriptor()
        };
        for change in [
            (|machine| machine.name = String::new()) as fn(&mut NewMachine),
            |machine| machine.name = "a\nb".to_owned(),
            |machine| machine.name = "a".repeat(81),
            |machine| machine.cpus = 0,
            |machine| machine.cpus = MOST_CPUS + 1,
            |machine| machine.memory_mib = 0,
            |machine| machine.memory_mib = 1025,
            |machine| machine.memory_mib = MOST_MEMORY_MIB + 4,
            |machine| machine.disks[0].name = "50%25.vmdk".to_owned(),
            |machine| machine.importer = Importer::VirtualBox,
            |machine| machine.networks = vec![String::new()],
            |machine| machine.networks = vec!["x".to_owned(); MOST_NETWORKS + 1],
            |machine| machine.disks[0].name = "../x".to_owned(),
            |machine| machine.disks[0].capacity_bytes = 513,
            |machine| machine.disks[0].name = "b.vmdk".to_owned(),
        ] {
            assert!(with(change).is_err());
        }
    }
}

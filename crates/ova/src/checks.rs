// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The faults of a package, and the parts of it that importers reject.

use crate::envelope::{Item, Machine, resource};
use crate::machine::{Importer, MEMORY_UNIT_BYTES};
use crate::package::Package;
use crate::pieces::pieces_of;
use crate::tar::{has_ending, printable};
use cowshed_layout::vmdk::{SparseHeader, embedded_descriptor, sectors_to_bytes};
use cowshed_types::{Error, Result};
use std::collections::HashSet;
use std::io::Read;

/// The weight of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Weight {
    /// Importers go on.
    Warning,
    /// The package is damaged, or an importer rejects it.
    Error,
}

/// Something that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Its weight.
    pub weight: Weight,
    /// The finding: one line, lower case.
    pub text: String,
}

/// The parts of which a machine has a number.
const COUNTED: [(&str, &str); 2] = [(resource::PROCESSOR, "processors"), (resource::MEMORY, "bytes of memory")];

/// Bytes of a disk's file that are looked at: the header and the descriptor of a VMDK disk.
const HEAD_BYTES: u64 = 64 << 10;

/// All findings, for the importers that are meant. With `digests` every file is read and compared with the manifest.
///
/// # Errors
/// Where files can't be read.
pub fn findings(package: &Package, importer: Importer, digests: bool) -> Result<Vec<Finding>> {
    let mut list = List::default();
    list.namespace(package);
    list.order(package);
    list.files(package);
    if digests {
        list.digests(package);
    }
    for (index, machine) in package.envelope.machines.iter().enumerate() {
        list.machine(machine, importer);
        package.envelope.items.iter().filter(|item| item.machine == index).for_each(|item| list.item(item, importer));
    }
    if package.envelope.machines.is_empty() {
        list.error("the descriptor has no VirtualSystem");
    }
    list.instances(package);
    list.compression(package)?;
    list.disks(package, importer)?;
    list.0.sort_by_key(|finding| std::cmp::Reverse(finding.weight));
    Ok(list.0)
}

#[derive(Default)]
struct List(Vec<Finding>);

impl List {
    fn error(&mut self, text: impl Into<String>) {
        self.0.push(Finding { weight: Weight::Error, text: text.into() });
    }

    fn warning(&mut self, text: impl Into<String>) {
        self.0.push(Finding { weight: Weight::Warning, text: text.into() });
    }

    fn namespace(&mut self, package: &Package) {
        let namespace = &package.envelope.namespace;
        match package.envelope.is_of_ovf() {
            true => {}
            false if namespace.is_empty() => self.error("the Envelope has no namespace: importers take it for another"),
            false => self.error(format!("the Envelope has a namespace that isn't OVF's: '{}'", printable(namespace))),
        }
    }

    /// Files that are to be stored with gzip, and aren't.
    fn compression(&mut self, package: &Package) -> Result<()> {
        for reference in package.envelope.files.iter().filter(|reference| reference.is_gzip) {
            if package.is_plain(reference)? {
                let name = printable(&reference.href);
                self.error(format!("'{name}' isn't stored with gzip, as the descriptor says (ovf:compression)"));
            }
        }
        Ok(())
    }

    /// DSP0243: the descriptor is the first file of the archive, the manifest the second or the last.
    fn order(&mut self, package: &Package) {
        if !package.is_archive() {
            return;
        }
        if package.members.first().is_none_or(|first| first.name != package.descriptor) {
            self.error("the descriptor isn't the first file of the archive");
        }
        let place = |name: &str| package.members.iter().position(|member| member.name == name);
        if let Some(place) = package.manifest_name.as_deref().and_then(place)
            && place != 1
            && place < package.members.len().saturating_sub(2)
        {
            self.warning("the manifest is neither behind the descriptor nor at the end");
        }
        if let Some(long) = package.members.iter().find(|member| member.name.len() > 100) {
            self.warning(format!("the name '{}' has more than 100 bytes", printable(&long.name)));
        }
        let stem = |name: &str| name.rsplit_once('.').map(|(stem, _)| stem.to_owned());
        if let Some(manifest) = &package.manifest_name
            && stem(manifest) != stem(&package.descriptor)
        {
            self.error(format!("the manifest '{}' hasn't the descriptor's name", printable(manifest)));
        }
    }

    /// References and files, both ways.
    fn files(&mut self, package: &Package) {
        let mut referenced = HashSet::from([package.descriptor.clone()]);
        referenced.extend(package.manifest_name.clone());
        for reference in &package.envelope.files {
            match pieces_of(reference) {
                Ok(pieces) => referenced.extend(pieces.into_iter().map(|(name, _)| name)),
                Err(error) => self.error(error.to_string()),
            }
            if let Err(error) = package.pieces(reference) {
                self.error(error.to_string());
            }
            if reference.size.is_none() {
                self.warning(format!("the length of '{}' isn't said", printable(&reference.href)));
            }
        }
        for member in package.members.iter().filter(|member| !referenced.contains(&member.name)) {
            match has_ending(&member.name, "cert") {
                true => self.warning("the signature isn't checked"),
                false => self.warning(format!("nothing refers to '{}'", printable(&member.name))),
            }
        }
    }

    fn digests(&mut self, package: &Package) {
        let Some(manifest) = &package.manifest else { return self.warning("there is no manifest") };
        let mut seen = HashSet::new();
        for line in manifest.lines.iter().filter(|line| seen.insert(line.name.clone())) {
            if let Err(error) = package.check_digest(&line.name, &|| false) {
                self.error(error.sentence());
            }
        }
        for member in &package.members {
            if !package.needs_no_digest(&member.name) && manifest.of(&member.name).is_none() {
                self.error(package.no_digest(&member.name).to_string());
            }
        }
    }

    fn machine(&mut self, machine: &Machine, importer: Importer) {
        if !machine.has_hardware {
            return self.error(format!("machine '{}' has no VirtualHardwareSection", printable(&machine.id)));
        }
        let families: Vec<String> = machine.families.iter().map(|family| printable(family)).collect();
        let is_vmware = |family: &String| family.starts_with("vmx-");
        let is_virtualbox = |family: &String| family.starts_with("virtualbox-");
        let named = families.join(" ");
        if families.is_empty() {
            self.error("the machine names no family of hardware (VirtualSystemType)");
        } else if importer.has_vmware() && !families.iter().any(is_vmware) {
            self.error(format!("VMware rejects the family of hardware '{named}': it wants vmx-NN"));
        } else if importer.has_virtualbox() && !families.iter().any(|one| is_vmware(one) || is_virtualbox(one)) {
            self.warning(format!("VirtualBox doesn't know the family of hardware '{named}'"));
        }
        for (key, is_optional) in &machine.extra_keys {
            if importer.has_vmware() && !is_optional {
                let key = printable(key);
                self.warning(format!("vCenter may reject the extra key '{key}', which isn't marked as optional"));
            }
        }
        if machine.firmware.as_deref() == Some("efi") && importer.has_virtualbox() {
            self.warning("VirtualBox doesn't read the firmware: turn EFI on after the import");
        }
    }

    fn item(&mut self, item: &Item, importer: Importer) {
        let (kind, subtype) = (item.field("ResourceType"), item.field("ResourceSubType"));
        if kind.is_empty() {
            self.error(format!("part '{}' of the machine has no ResourceType", printable(item.field("InstanceID"))));
        }
        if importer.has_vmware() && subtype.to_ascii_uppercase().starts_with("PIIX") {
            self.error(format!("VMware rejects the controller '{}': leave ResourceSubType out", printable(subtype)));
        }
        if importer.has_vmware() && kind == resource::SOUND && !item.is_optional {
            self.error("VMware rejects the sound card (ResourceType 35) that isn't marked as optional");
        }
        if let Some((_, what)) = COUNTED.iter().find(|(counted, _)| *counted == kind)
            && item.quantity().is_none_or(|number| number == 0)
        {
            let quantity = printable(item.field("VirtualQuantity"));
            self.error(format!("'{quantity}' is no number of {what} (VirtualQuantity)"));
        }
        let memory = if kind == resource::MEMORY { item.quantity() } else { None };
        if let Some(bytes) = memory.filter(|bytes| importer.has_vmware() && !bytes.is_multiple_of(MEMORY_UNIT_BYTES)) {
            self.error(format!("VMware rejects {bytes} bytes of memory: it wants whole 4 MiB"));
        }
        if importer.has_vmware() && kind == "20" && subtype.eq_ignore_ascii_case("AHCI") {
            self.warning("VMware's word for a SATA controller is vmware.sata.ahci, not AHCI");
        }
    }

    /// Numbers that parts refer to each other by.
    fn instances(&mut self, package: &Package) {
        let items = &package.envelope.items;
        let mut seen = HashSet::new();
        for item in items {
            let (id, parent) = (item.field("InstanceID"), item.field("Parent"));
            if id.is_empty() {
                self.error("a part of the machine has no InstanceID");
            } else if !seen.insert((item.machine, id)) {
                self.error(format!("two parts of the machine have the InstanceID {}", printable(id)));
            }
            let others =
                || items.iter().any(|other| other.machine == item.machine && other.field("InstanceID") == parent);
            if !parent.is_empty() && !others() {
                self.error(format!("part {} hangs on part {}, which isn't there", printable(id), printable(parent)));
            }
        }
    }

    fn disks(&mut self, package: &Package, importer: Importer) -> Result<()> {
        for disk in &package.envelope.disks {
            let uses = ["ovf:/disk/", "/disk/"].map(|start| format!("{start}{}", disk.id));
            let is_used =
                package.envelope.items.iter().any(|item| uses.iter().any(|name| name == item.field("HostResource")));
            if !is_used {
                self.warning(format!("no machine has disk '{}'", printable(&disk.id)));
            }
        }
        for item in package.envelope.items.iter().filter(|item| item.field("ResourceType") == resource::DISK) {
            let host = item.field("HostResource");
            let id = host.rsplit_once("/disk/").map(|(_, id)| id);
            if id.is_some_and(|id| !package.envelope.disks.iter().any(|disk| disk.id == id)) {
                self.error(format!("the machine has the disk '{}', which isn't declared", printable(host)));
            }
        }
        for disk in package.disks() {
            // Files that are missing or of another length are reported already.
            let disk = match disk {
                Ok(disk) => disk,
                Err(error) if package.envelope.files.iter().all(|file| package.pieces(file).is_ok()) => {
                    self.error(error.to_string());
                    continue;
                }
                Err(_) => continue,
            };
            let name = printable(&disk.name);
            if importer.has_vmware() && disk.format != "vmdk" {
                self.error(format!("VMware rejects disk '{name}': it is no VMDK"));
            }
            let len: u64 = disk.pieces.iter().map(|piece| piece.len).sum();
            if let Some(said) = disk.capacity_bytes.filter(|&said| disk.format == "raw" && !disk.is_gzip && said != len)
            {
                self.error(format!("disk '{name}' has {len} bytes, and the descriptor says {said}"));
            }
            if disk.format != "vmdk" || disk.is_gzip {
                continue;
            }
            // The first pieces of a disk in several may be shorter than what is looked at.
            let mut head = Vec::new();
            for member in disk.pieces.iter().map_while(|piece| package.member(&piece.name)) {
                let left = HEAD_BYTES - head.len() as u64;
                let read = package.reader(member)?.take(left).read_to_end(&mut head);
                read.map_err(|error| Error::io(&error, format!("could not read '{name}'")))?;
            }
            if disk.pieces.first().is_none_or(|piece| package.member(&piece.name).is_none()) {
                continue;
            }
            self.stream(&name, &head, disk.capacity_bytes, importer);
        }
        Ok(())
    }

    /// The head of a VMDK disk: the kind that importers take, with the capacity of the descriptor.
    fn stream(&mut self, name: &str, head: &[u8], capacity_bytes: Option<u64>, importer: Importer) {
        let header = match SparseHeader::parse(head) {
            Ok(header) => header,
            Err(error) => return self.error(format!("disk '{name}' is no VMDK of one file: {error}")),
        };
        let bytes = sectors_to_bytes(header.capacity_sectors);
        if let Some(said) = capacity_bytes.filter(|&said| Some(said) != bytes) {
            let bytes = bytes.unwrap_or_default();
            self.error(format!("disk '{name}' has {bytes} bytes, and the descriptor says {said}"));
        }
        if !importer.has_vmware() {
            return;
        }
        if !header.compressed || header.version != 3 {
            self.error(format!("VMware rejects disk '{name}': it isn't streamOptimized of version 3"));
        }
        let text = header.descriptor.and_then(|(start, len)| {
            let (start, len) = (sectors_to_bytes(start)?, sectors_to_bytes(len)?);
            let start = usize::try_from(start).ok()?;
            head.get(start..head.len().min(start.checked_add(usize::try_from(len).ok()?)?)).map(|text| (start, text))
        });
        match text.map(|(start, text)| embedded_descriptor(text, start as u64)) {
            Some(Ok(descriptor)) if descriptor.create_type == "streamOptimized" && !descriptor.has_parent() => {}
            Some(Ok(descriptor)) if descriptor.has_parent() => {
                self.error(format!("disk '{name}' is a difference to another disk"));
            }
            _ => self.error(format!("VMware rejects disk '{name}': its descriptor doesn't say streamOptimized")),
        }
    }
}

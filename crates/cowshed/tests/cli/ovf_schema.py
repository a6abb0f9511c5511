# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Holds a descriptor against the structure of DSP8023 (envelope), DSP8025 and the CIM classes of its items: the order of
elements, how often each may stand there, and the attributes that must. Prints a line for each fault."""

import sys
import xml.etree.ElementTree as xml

OVF = "{http://schemas.dmtf.org/ovf/envelope/1}"
CIM = "{http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/"
RASD, VSSD = CIM + "CIM_ResourceAllocationSettingData}", CIM + "CIM_VirtualSystemSettingData}"
VMW = "{http://www.vmware.com/schema/ovf}"
ANY = None

# The fields of an item have the order of their names: name, at most, at least.
ITEM = [
    (RASD + name, most, least)
    for name, most, least in [
        ("Address", 1, 0), ("AddressOnParent", 1, 0), ("AllocationUnits", 1, 0), ("AutomaticAllocation", 1, 0),
        ("AutomaticDeallocation", 1, 0), ("Caption", 1, 0), ("Connection", ANY, 0), ("ConsumerVisibility", 1, 0),
        ("Description", 1, 0), ("ElementName", 1, 1), ("HostResource", ANY, 0), ("InstanceID", 1, 1), ("Limit", 1, 0),
        ("MappingBehavior", 1, 0), ("OtherResourceType", 1, 0), ("Parent", 1, 0), ("PoolID", 1, 0), ("Reservation", 1, 0),
        ("ResourceSubType", 1, 0), ("ResourceType", 1, 0), ("VirtualQuantity", 1, 0), ("VirtualQuantityUnits", 1, 0),
        ("Weight", 1, 0),
    ]
]
SYSTEM = [
    (VSSD + name, 1, least)
    for name, least in [
        ("AutomaticRecoveryAction", 0), ("AutomaticShutdownAction", 0), ("AutomaticStartupAction", 0),
        ("AutomaticStartupActionDelay", 0), ("AutomaticStartupActionSequenceNumber", 0), ("Caption", 0),
        ("ConfigurationDataRoot", 0), ("ConfigurationFile", 0), ("ConfigurationID", 0), ("CreationTime", 0),
        ("Description", 0), ("ElementName", 1), ("InstanceID", 1), ("LogDataRoot", 0), ("Notes", 0), ("RecoveryFile", 0),
        ("SnapshotDataRoot", 0), ("SuspendDataRoot", 0), ("SwapFileDataRoot", 0), ("VirtualSystemIdentifier", 0),
        ("VirtualSystemType", 0),
    ]
]
INFO = (OVF + "Info", 1, 1)
CHILDREN = {
    OVF + "Envelope": [
        (OVF + "References", 1, 1), (OVF + "DiskSection", 1, 0), (OVF + "NetworkSection", 1, 0), (OVF + "VirtualSystem", 1, 1),
    ],
    OVF + "References": [(OVF + "File", ANY, 0)],
    OVF + "DiskSection": [INFO, (OVF + "Disk", ANY, 0)],
    OVF + "NetworkSection": [INFO, (OVF + "Network", ANY, 0)],
    OVF + "Network": [(OVF + "Description", 1, 0)],
    OVF + "VirtualSystem": [
        INFO, (OVF + "Name", 1, 0), (OVF + "OperatingSystemSection", 1, 0), (OVF + "VirtualHardwareSection", ANY, 1),
    ],
    OVF + "OperatingSystemSection": [INFO, (OVF + "Description", 1, 0)],
    # Elements of others follow.
    OVF + "VirtualHardwareSection": [INFO, (OVF + "System", 1, 0), (OVF + "Item", ANY, 0), (VMW + "Config", ANY, 0)],
    OVF + "System": SYSTEM,
    OVF + "Item": ITEM,
}
NEEDED = {
    OVF + "File": ["id", "href"],
    OVF + "Disk": ["diskId", "capacity"],
    OVF + "Network": ["name"],
    OVF + "VirtualSystem": ["id"],
    OVF + "OperatingSystemSection": ["id"],
}
ALLOWED = {
    OVF + "File": ["id", "href", "size", "compression", "chunkSize"],
    OVF + "Disk": ["diskId", "fileRef", "capacity", "capacityAllocationUnits", "format", "populatedSize", "parentRef"],
    OVF + "Network": ["name"],
    OVF + "VirtualSystem": ["id"],
    OVF + "OperatingSystemSection": ["id", "version", "required"],
}
NUMBERS = {"size", "populatedSize", "chunkSize"}
UNSIGNED = {"Address", "Limit", "Reservation", "ResourceType", "VirtualQuantity", "Weight"}


def faults(element):
    name = element.tag.split("}")[1]
    places = [tag for tag, _, _ in CHILDREN.get(element.tag, [])]
    found = [places.index(child.tag) if child.tag in places else -1 for child in element]
    if -1 in found:
        yield f"{name} has no {element[found.index(-1)].tag}"
    if found != sorted(found):
        yield f"the elements of {name} have another order"
    for index, (tag, most, least) in enumerate(CHILDREN.get(element.tag, [])):
        count = found.count(index)
        if count < least or (most is not ANY and count > most):
            yield f"{name} has {count} of {tag.split('}')[1]}"
    given = [key[len(OVF):] for key in element.attrib if key.startswith(OVF)]
    for key in NEEDED.get(element.tag, []):
        if key not in given:
            yield f"{name} lacks the attribute {key}"
    for key in given if element.tag in ALLOWED else []:
        if key not in ALLOWED[element.tag]:
            yield f"{name} has no attribute {key}"
        if key in NUMBERS and not element.get(OVF + key).isdigit():
            yield f"{key} of {name} is no number"
    if element.tag.startswith(RASD) and name in UNSIGNED and not (element.text or "").isdigit():
        yield f"{name} is no number"
    for child in element:
        yield from faults(child)


def keys(root, path, key):
    return [element.get(OVF + key) for element in root.iter(OVF + path) if element.get(OVF + key) is not None]


root = xml.parse(sys.argv[1]).getroot()
lines = [] if root.tag == OVF + "Envelope" else ["the root is no Envelope"]
lines += faults(root)
# Identifiers are there once, and lead somewhere.
for path, key in [("File", "id"), ("Disk", "diskId"), ("Network", "name")]:
    known = keys(root, path, key)
    if len(known) != len(set(known)):
        lines.append(f"{key} of {path} is there twice")
if not set(keys(root, "Disk", "fileRef")) <= set(keys(root, "File", "id")):
    lines.append("a disk has no file")
instances = [element.text for element in root.iter(RASD + "InstanceID")]
if len(instances) != len(set(instances)):
    lines.append("an InstanceID is there twice")
if not {element.text for element in root.iter(RASD + "Parent")} <= set(instances):
    lines.append("a Parent is no instance")
disks = {"ovf:/disk/" + name for name in keys(root, "Disk", "diskId")}
if not {element.text for element in root.iter(RASD + "HostResource")} <= disks:
    lines.append("a HostResource is no disk")
if not {element.text for element in root.iter(RASD + "Connection")} <= set(keys(root, "Network", "name")):
    lines.append("a Connection is no network")
print("\n".join(lines))

// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A libvirtd of the test's own: the session daemon of a user without rights, with its own home and sockets.

use super::tools::{make_tools, path_with, text};
use cowshed_testkit::programs::finish;
use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The user and the group `nobody`. Libvirt's session daemon doesn't run as root.
const NOBODY: u32 = 65534;

/// Libvirt asks QEMU for all that it can do when it starts.
const START_LIMIT: Duration = Duration::from_secs(120);

pub(crate) struct Libvirt {
    folder: TempDir,
    daemon: Child,
    tools: Option<PathBuf>,
    domains: Vec<String>,
}

impl Libvirt {
    /// With our tools first on its PATH, or with the system's.
    pub(crate) fn start(ours: bool) -> Libvirt {
        // Other users can't enter our own folders.
        let folder = tempfile::Builder::new().prefix("cowshed-clients-").tempdir_in("/tmp").expect("a folder");
        let tools = ours.then(|| make_tools(folder.path()));
        for name in ["run", "config", "cache", "pool", "images"] {
            fs::create_dir(folder.path().join(name)).expect("a folder");
        }
        if is_root() {
            for name in ["", "run", "config", "cache", "pool", "images"] {
                chown(folder.path().join(name), Some(NOBODY), Some(NOBODY)).expect("chown");
            }
        }
        let mut command = command_in(folder.path(), tools.as_deref(), "libvirtd");
        let log = fs::File::create(folder.path().join("libvirtd.log")).expect("a log");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let daemon = command.spawn().expect("libvirtd runs: scripts/setup test installs it");
        let libvirt = Libvirt { folder, daemon, tools, domains: Vec::new() };
        let started = Instant::now();
        while finish(libvirt.command("virsh").args(["-q", "-c", "qemu:///session", "uri"])).code != Some(0) {
            let log = fs::read_to_string(libvirt.path("libvirtd.log")).unwrap_or_default();
            assert!(started.elapsed() < START_LIMIT, "libvirtd doesn't start: {log}");
            // Between two attempts, with the bound above.
            std::thread::sleep(Duration::from_millis(100));
        }
        libvirt
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A program in the folder, as the daemon's user and with its PATH.
    pub(crate) fn command(&self, program: &str) -> Command {
        command_in(self.folder.path(), self.tools.as_deref(), program)
    }

    /// The output of a command of virsh.
    #[track_caller]
    pub(crate) fn virsh(&self, arguments: &[&str]) -> String {
        let mut command = self.command("virsh");
        command.args(["-q", "-c", "qemu:///session"]).args(arguments);
        let said = finish(&mut command);
        assert_eq!(said.code, Some(0), "virsh {arguments:?}: {}", said.err);
        said.out
    }

    /// Writes XML that commands of virsh read.
    pub(crate) fn write(&self, name: &str, content: &str) -> String {
        let path = self.path(name);
        fs::write(&path, content).expect("a file");
        text(&path).to_owned()
    }

    /// Defines a machine without a system, whose one disk is the image, and starts it without running it.
    pub(crate) fn start_paused(&mut self, name: &str, image: &Path) {
        let domain = format!(
            "<domain type='qemu'><name>{name}</name><memory unit='MiB'>32</memory><os><type>hvm</type></os>
             <devices><emulator>/usr/bin/qemu-system-x86_64</emulator><disk type='file' device='disk'>
             <driver name='qemu' type='qcow2'/><source file='{}'/><target dev='vda' bus='virtio'/></disk></devices></domain>",
            image.display()
        );
        let file = self.write("domain.xml", &domain);
        self.virsh(&["define", &file]);
        self.virsh(&["start", "--paused", name]);
        self.domains.push(name.to_owned());
    }

    /// Ends a machine.
    pub(crate) fn destroy(&mut self, name: &str) {
        self.virsh(&["destroy", name]);
        self.domains.retain(|domain| domain != name);
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        for domain in &self.domains {
            // The test may have failed because it is gone.
            let _ = finish(self.command("virsh").args(["-c", "qemu:///session", "destroy", domain]));
        }
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn command_in(folder: &Path, tools: Option<&Path>, program: &str) -> Command {
    let mut command = match is_root() {
        true => {
            let mut command = Command::new("setpriv");
            command.args([format!("--reuid={NOBODY}"), format!("--regid={NOBODY}"), "--clear-groups".to_owned()]);
            command.arg(program);
            command
        }
        false => Command::new(program),
    };
    command.current_dir(folder).env("PATH", path_with(tools)).env("HOME", folder).env("LC_ALL", "C.UTF-8");
    for (variable, name) in [("XDG_RUNTIME_DIR", "run"), ("XDG_CONFIG_HOME", "config"), ("XDG_CACHE_HOME", "cache")] {
        command.env(variable, folder.join(name));
    }
    command
}

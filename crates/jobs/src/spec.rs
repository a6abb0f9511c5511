// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How the user names an image.

/// An image as named on a command line or in a QMP command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageSpec {
    /// File name, `json:{…}` name, or with `image_opts` a `driver=…,file.filename=…` list.
    pub name: String,
    /// Format; probed when `None`. Not together with `image_opts`.
    pub format: Option<String>,
    /// `name` is an option list (`--image-opts`).
    pub image_opts: bool,
    /// Share everything with other users of the image (`-U`).
    pub force_share: bool,
    /// Cache mode: `none`, `writeback`, `writethrough`, `directsync`, `unsafe`.
    pub cache: Option<String>,
}

impl ImageSpec {
    /// The image in file `name`, its format probed.
    pub fn file(name: impl Into<String>) -> Self {
        ImageSpec { name: name.into(), ..ImageSpec::default() }
    }

    /// Sets the format.
    #[must_use]
    pub fn format(mut self, format: impl Into<String>) -> Self {
        self.format = Some(format.into());
        self
    }
}

// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The page that a browser shows.

use crate::output::size::human;

/// The facts on the page.
#[derive(Clone, Debug)]
pub struct Facts {
    pub file_name: String,
    /// Virtual size in bytes.
    pub disk_bytes: u64,
    /// The length of a download in bytes, where that is known.
    pub file_bytes: Option<u64>,
    /// SHA-256 of the download, as hexadecimal digits.
    pub digest: Option<String>,
    /// The reason of a missing digest.
    pub trouble: Option<&'static str>,
}

const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;max-width:42em;margin:4em auto;padding:0 1em;color:#222;background:#fff}\
h1{font-size:1.4em;overflow-wrap:anywhere}dt{color:#666}dd{margin:0 0 .8em;overflow-wrap:anywhere}code{font-size:.9em}\
a{display:inline-block;padding:.6em 1.4em;border-radius:.4em;background:#1a5fb4;color:#fff;text-decoration:none}\
@media(prefers-color-scheme:dark){body{color:#ddd;background:#1e1e1e}dt{color:#999}}";

/// The page. `comes`: a digest that isn't there yet is being computed.
pub fn html(facts: &Facts, comes: bool) -> String {
    let Facts { file_name, disk_bytes, file_bytes, digest, trouble } = facts;
    let name = escaped(file_name);
    let file = match file_bytes {
        Some(bytes) => format!("{} ({bytes} bytes)", human(*bytes)),
        None => "known when it has been compressed once".to_owned(),
    };
    let digest = match (digest, comes) {
        (Some(digest), _) => format!("<dt>SHA-256 of the download</dt><dd><code id=\"digest\">{digest}</code></dd>"),
        (None, true) => {
            "<dt>SHA-256 of the download</dt><dd id=\"digest\">being computed; reload to see it</dd>".to_owned()
        }
        (None, false) => match trouble {
            Some(trouble) => format!("<dt>SHA-256 of the download</dt><dd id=\"digest\">none: {trouble}</dd>"),
            None => String::new(),
        },
    };
    format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\"><meta name=\"robots\" content=\"noindex\">\
         <meta name=\"referrer\" content=\"no-referrer\"><title>{name}</title><style>{STYLE}</style></head><body>\
         <h1>{name}</h1><dl><dt>Size of the disk</dt><dd id=\"disk\">{} ({disk_bytes} bytes)</dd>\
         <dt>Size of the download</dt><dd id=\"file\">{file}</dd>{digest}</dl>\
         <p><a id=\"download\" href=\"?download\">Download</a></p></body></html>\n",
        human(*disk_bytes),
    )
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_no_markup() {
        let digest = Some("abc".to_owned());
        let facts =
            Facts { file_name: "<b>&\"".into(), disk_bytes: 1 << 20, file_bytes: Some(5), digest, trouble: None };
        let page = html(&facts, true);
        assert!(page.contains("<h1>&lt;b&gt;&amp;&quot;</h1>") && !page.contains("<b>"), "{page}");
        assert!(page.contains("1 MiB (1048576 bytes)") && page.contains(">abc</code>"), "{page}");
        let without = Facts { digest: None, ..facts };
        assert!(!html(&without, false).contains("SHA-256"));
        assert!(html(&Facts { trouble: Some("no"), ..without }, false).contains(">none: no</dd>"));
    }
}

//! Artifacts on disk: digests, keys, manifests, locks, atomic publish. Knows no stage, no table, no tensor.
//!
//! ```text
//! objects/ab/abcdef…               immutable files by BLAKE3 digest
//! artifacts/<stage>/<key>/         manifest.json + the files under their real names (hard links into objects)
//! work/<stage>/<key>/{out,scratch} work in progress; becomes the artifact by one rename
//! work/<stage>/<key>/{fetched,parts} the same, of an artifact that comes from elsewhere
//! runs/<recipe>/<n>/run.json       what ran, why, how long
//! locks/<stage>-<key>.lock         one maker per key
//! trash/                           what the collector is removing
//! live/<pid>-…                     what running commands have looked up, kept from collection
//! quarantine/<digest>              damaged files, moved aside
//! memo/…                           answers that are cheap to lose: identities of files, of programs, of Hub revisions
//! ```

mod cache;
mod digest;
mod error;
mod gc;
mod identity;
mod integrity;
mod live;
mod lock;
mod manifest;
mod memo;
mod publish;
mod runs;

pub use cache::{Artifact, Cache, Lookup, Staging};
pub use digest::{Digest, canonical_json};
pub use error::Error;
pub use gc::{Collected, Collection, Policy};
pub use identity::{Entry, FileStamp, Identity, RACY, files_matching};
pub use lock::Lock;
pub use manifest::{FileRecord, InputRecord, Manifest, Material, SCHEMA, SourceRecord};
pub use memo::Memo;
pub use publish::Finished;
pub use runs::{RunFolder, replace_link};

/// Result with the store's error.
pub type Result<T> = std::result::Result<T, Error>;

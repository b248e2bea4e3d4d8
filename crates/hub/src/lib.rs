//! Models and data sets of the Hugging Face Hub, as blocking calls over `hf-hub`. The cache on disk is the one Python's
//! `huggingface_hub` uses. Knows nothing of what the files hold.

mod cache;
mod error;
mod hub;
mod listing;
mod repo;
mod retry;
mod sound;
#[doc(hidden)]
pub mod testing;
mod transfer;

pub use cache::RemoteFile;
pub use error::Error;
pub use hub::{Hub, Options, local_folder};
pub use repo::{Commit, Repo};
pub use transfer::{Progress, quiet};

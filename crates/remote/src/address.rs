//! From an address to a client. The address names a place and holds no secret.

use std::str::FromStr;
use std::sync::Arc;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ClientConfigKey, ObjectStore, ObjectStoreScheme, RetryConfig};
use url::Url;

use crate::{Error, Result};

/// One request may take so long: some megabytes over a slow line.
const TIMEOUT: &str = "5 minutes";
/// A store that does not answer is given up after so many tries…
const RETRIES: usize = 4;
/// …or so long.
const RETRY_TIMEOUT: std::time::Duration = std::time::Duration::from_mins(1);

pub(crate) fn open(
    address: &str,
    variables: impl Iterator<Item = (String, String)>,
) -> Result<(Arc<dyn ObjectStore>, Path)> {
    let url = parse(address)?;
    let wrong = |detail: String| Error::Address { what: detail };
    let (scheme, root) = ObjectStoreScheme::parse(&url).map_err(|_| unknown_scheme(url.scheme()))?;
    let refused = |error: object_store::Error| wrong(crate::error::chain(&error));
    let retry = RetryConfig { max_retries: RETRIES, retry_timeout: RETRY_TIMEOUT, ..RetryConfig::default() };
    // Only the place: what else an address could hold would be a secret in someone's shell history.
    let place = url.as_str();
    let store: Arc<dyn ObjectStore> = match scheme {
        ObjectStoreScheme::Local => {
            let folder = url.to_file_path().map_err(|()| wrong(format!("`{address}` is no path of this machine")))?;
            let opened = LocalFileSystem::new_with_prefix(&folder);
            let opened = opened.map_err(|_| Error::Folder { folder: folder.clone() })?;
            return Ok((Arc::new(opened), Path::default()));
        }
        ObjectStoreScheme::AmazonS3 => {
            let timeout = AmazonS3ConfigKey::Client(ClientConfigKey::Timeout);
            let builder = AmazonS3Builder::new().with_config(timeout, TIMEOUT);
            let builder = settings(variables, "AWS_").fold(builder, |b, (key, value)| b.with_config(key, value));
            Arc::new(builder.with_url(place).with_retry(retry).build().map_err(refused)?)
        }
        ObjectStoreScheme::GoogleCloudStorage => {
            let timeout = GoogleConfigKey::Client(ClientConfigKey::Timeout);
            let builder = GoogleCloudStorageBuilder::new().with_config(timeout, TIMEOUT);
            let builder = settings(variables, "GOOGLE_").fold(builder, |b, (key, value)| b.with_config(key, value));
            Arc::new(builder.with_url(place).with_retry(retry).build().map_err(refused)?)
        }
        ObjectStoreScheme::MicrosoftAzure => {
            let timeout = AzureConfigKey::Client(ClientConfigKey::Timeout);
            let builder = MicrosoftAzureBuilder::new().with_config(timeout, TIMEOUT);
            let builder = settings(variables, "AZURE_").fold(builder, |b, (key, value)| b.with_config(key, value));
            Arc::new(builder.with_url(place).with_retry(retry).build().map_err(refused)?)
        }
        _ => return Err(unknown_scheme(url.scheme())),
    };
    Ok((store, root))
}

/// The settings among the variables; others of the same prefix are none of ours.
fn settings<K: FromStr>(
    variables: impl Iterator<Item = (String, String)>,
    prefix: &'static str,
) -> impl Iterator<Item = (K, String)> {
    variables
        .filter(move |(name, _)| name.starts_with(prefix))
        .filter_map(|(name, value)| Some((name.to_ascii_lowercase().parse().ok()?, value)))
}

fn parse(address: &str) -> Result<Url> {
    let url = match Url::parse(address) {
        Ok(url) => url,
        // No part of what cannot be read is repeated: it may hold a secret.
        Err(_) if address.starts_with('/') => {
            return Err(Error::Address { what: format!("`{address}` is a path; write `file://{address}`") });
        }
        Err(error) => return Err(Error::Address { what: format!("the address cannot be read: {error}") }),
    };
    // `abfss://container@account.…` names a place; a password never does.
    let named = matches!(url.scheme(), "abfs" | "abfss") || url.username().is_empty();
    if url.password().is_some() || url.query().is_some() || url.fragment().is_some() || !named {
        let what = "the address holds more than a place".to_owned();
        return Err(Error::Secret { what });
    }
    Ok(url)
}

fn unknown_scheme(scheme: &str) -> Error {
    Error::Address { what: format!("`{scheme}://` is no address of a remote") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_place_and_no_more() {
        for good in ["s3://bucket/a/b", "s3://bucket", "gs://bucket/x", "abfss://box@account.dfs.core.windows.net/x"] {
            assert!(parse(good).is_ok(), "{good}");
        }
        for secret in [
            "s3://KEY:hidden@bucket/a",
            "s3://hidden@bucket/a",
            "az://box/a?sv=2024&sig=hidden",
            "gs://bucket/a#hidden",
        ] {
            let refused = parse(secret).unwrap_err();
            assert!(matches!(refused, Error::Secret { .. }), "{secret}");
            assert!(!format!("{refused:?} {refused}").contains("hidden"), "{refused}");
        }
        for wrong in ["/mnt/cache", "bucket", "ftp://host/x", "http://host/x", "memory:///x"] {
            assert!(matches!(open(wrong, std::iter::empty()), Err(Error::Address { .. })), "{wrong}");
        }
        assert!(matches!(open("file:///nowhere/at/all", std::iter::empty()), Err(Error::Folder { .. })));
    }
}

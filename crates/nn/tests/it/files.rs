//! Weight files: equal to the reference implementation's, sharded as diffusers shards, and safe against hostile headers.

use std::collections::BTreeMap;
use std::path::Path;

use nn::{Named, Weights, save};
use safetensors::tensor::{Dtype, TensorView, serialize};
use tch::{Kind, Tensor};

use crate::{assert_same, random};

fn metadata() -> BTreeMap<String, String> {
    BTreeMap::from([("format".to_owned(), "pt".to_owned())])
}

#[test]
fn what_is_written_is_byte_for_byte_the_reference_and_reads_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.safetensors");
    let x = random(1, &[3, 4]);
    let tensors = [
        ("z.half", x.to_kind(Kind::Half), Dtype::F16),
        ("b.wide", x.to_kind(Kind::Double), Dtype::F64),
        ("a.bf16", x.to_kind(Kind::BFloat16), Dtype::BF16),
        ("m.turned", x.tr().contiguous(), Dtype::F32),
        ("m.number", Tensor::from(7i64), Dtype::I64),
        ("m.empty", random(1, &[0, 4]), Dtype::F32),
        ("m.bytes", Tensor::from_slice(&[1u8, 2, 3]), Dtype::U8),
    ];
    save::save_safetensors(&path, tensors.iter().map(|(name, tensor, _)| (*name, tensor)), &metadata()).unwrap();

    let views = tensors.iter().map(|(name, tensor, dtype)| {
        let shape = tensor.size().iter().map(|&side| side as usize).collect();
        (*name, TensorView::new(*dtype, shape, torch::host::bytes(tensor).unwrap()).unwrap())
    });
    let reference = serialize(views, Some(metadata().into_iter().collect())).unwrap();
    assert!(fs_err::read(&path).unwrap() == reference, "the bytes differ");
    assert_eq!(fs_err::read_dir(folder.path()).unwrap().count(), 1); // no temporary file is left

    let weights = Weights::file(&path).unwrap();
    assert_eq!(weights.metadata(), &metadata());
    assert_eq!(weights.names().count(), tensors.len());
    for (name, tensor, _) in &tensors {
        assert_same(&weights.tensor(name).unwrap(), tensor);
    }
    // A view that is not contiguous is written by value.
    save::save_safetensors(&path, [("t", &x.tr())], &metadata()).unwrap();
    assert_same(&Weights::file(&path).unwrap().tensor("t").unwrap(), &x.tr());
}

fn named(name: &str, count: i64) -> Named {
    Named { name: name.to_owned(), tensor: random(count as u64, &[count]) }
}

#[test]
fn shards_fill_in_order_and_are_named_as_diffusers_names_them() {
    let folder = tempfile::tempdir().unwrap();
    // 40, 40, 400 and 20 bytes, by shards of 100: the large one has its own, the others go on as if it were not there.
    let tensors = [named("d", 10), named("c", 10), named("huge", 100), named("a", 5), named("b", 5)];
    let files = save::save_model(folder.path(), "model", &tensors, None, 100).unwrap();
    let names: Vec<_> = files.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
    let expected = [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ];
    assert_eq!(names, expected);
    let index: serde_json::Value = serde_json::from_slice(&fs_err::read(&files[3]).unwrap()).unwrap();
    assert_eq!(index["metadata"]["total_size"], 520);
    let shard = |name: &str| index["weight_map"][name].as_str().unwrap()[6..11].to_owned();
    assert_eq!(["huge", "d", "c", "a", "b"].map(shard), ["00001", "00002", "00002", "00002", "00003"]);

    let weights = Weights::open(folder.path(), "model").unwrap();
    for named in &tensors {
        assert_same(&weights.tensor(&named.name).unwrap(), &named.tensor);
    }
}

#[test]
fn a_small_model_is_one_file_in_the_kind_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let files =
        save::save_model(folder.path(), "m", &[named("a", 5)], Some(Kind::BFloat16), save::SHARD_BYTES).unwrap();
    assert_eq!(files, [folder.path().join("m.safetensors")]);
    let weights = Weights::open(folder.path(), "m").unwrap();
    assert_same(&weights.tensor("a").unwrap(), &named("a", 5).tensor.to_kind(Kind::BFloat16));
}

#[test]
fn a_write_that_fails_leaves_the_old_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    save::save_safetensors(&path, [("a", &random(1, &[3]))], &metadata()).unwrap();
    let before = fs_err::read(&path).unwrap();
    let complex = Tensor::zeros([2], (Kind::ComplexFloat, tch::Device::Cpu));
    assert!(save::save_safetensors(&path, [("a", &complex)], &metadata()).is_err());
    assert_eq!(fs_err::read(&path).unwrap(), before);
}

fn refusal(path: &Path, bytes: &[u8]) -> String {
    fs_err::write(path, bytes).unwrap();
    let error = Weights::file(path).unwrap_err().to_string();
    let prefix = format!("`{}`: ", path.display());
    error.strip_prefix(&prefix).unwrap_or_else(|| panic!("does not name the file: {error}")).to_owned()
}

fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

#[test]
fn hostile_headers_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("evil.safetensors");
    let tensor = |fields: &str| with_header(&format!(r#"{{"w":{{{fields}}}}}"#), &[0; 8]);
    let cases = [
        (b"".to_vec(), "not a safetensors file: "),
        (b"PK\x03\x04 not this".to_vec(), "not a safetensors file, or cut short"),
        (u64::MAX.to_le_bytes().to_vec(), "not a safetensors file, or cut short: header of 18446744073709551615 bytes"),
        (with_header("{", &[]), "header: "),
        (with_header("[]", &[]), "header: "),
        (with_header(r#"{"__metadata__":{"a":1}}"#, &[]), "`__metadata__`: "),
        (tensor(r#""dtype":"F32","shape":[2]"#), "tensor `w`: missing field `data_offsets`"),
        (tensor(r#""dtype":"Q4","shape":[2],"data_offsets":[0,8]"#), "tensor `w`: dtype `Q4` is not supported"),
        (tensor(r#""dtype":"F32","shape":[-2],"data_offsets":[0,8]"#), "tensor `w`: impossible shape [-2]"),
        (
            tensor(r#""dtype":"F32","shape":[4611686018427387904,4,4],"data_offsets":[0,8]"#),
            "tensor `w`: impossible shape",
        ),
        (
            tensor(r#""dtype":"F32","shape":[3],"data_offsets":[0,12]"#),
            "tensor `w`: bytes 0..12 of 8 do not hold F32 [3]",
        ),
        (
            tensor(r#""dtype":"F32","shape":[3],"data_offsets":[0,8]"#),
            "tensor `w`: bytes 0..8 of 8 do not hold F32 [3]",
        ),
        (tensor(r#""dtype":"F32","shape":[2],"data_offsets":[8,0]"#), "tensor `w`: bytes 8..0"),
        (tensor(r#""dtype":"F32","shape":[1],"data_offsets":[4,8]"#), "its tensors do not fill its 8 bytes"),
        (tensor(r#""dtype":"F32","shape":[1],"data_offsets":[0,4]"#), "its tensors do not fill its 8 bytes"),
        (
            with_header(
                r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#,
                &[0; 8],
            ),
            "its tensors do not fill its 8 bytes",
        ),
    ];
    for (bytes, expected) in cases {
        let message = refusal(&path, &bytes);
        assert!(message.starts_with(expected), "{message}\nexpected {expected}");
    }
    let missing = folder.path().join("absent.safetensors");
    assert!(Weights::file(&missing).unwrap_err().to_string().contains(missing.to_str().unwrap()));
}

#[test]
fn an_index_may_only_name_files_beside_it_that_hold_its_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let index = |shard: &str| {
        let text = format!(r#"{{"weight_map":{{"w":"{shard}"}}}}"#);
        fs_err::write(folder.path().join("m.safetensors.index.json"), text).unwrap();
        Weights::open(folder.path(), "m").unwrap_err().to_string()
    };
    for shard in ["../w.safetensors", "/etc/passwd", "a/b", "..", ""] {
        assert!(index(shard).ends_with(&format!("shard `{shard}` is not a plain file name")));
    }
    save::save_safetensors(&folder.path().join("s"), [("v", &random(1, &[1]))], &metadata()).unwrap();
    assert!(index("s").ends_with("no shard holds `w`"));
}

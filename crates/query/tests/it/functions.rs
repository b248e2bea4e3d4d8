//! Tensor functions against numpy in float64, on the same f16 and bf16 bits.

use std::sync::Arc;

use arrow::array::{
    ArrayRef, BinaryArray, FixedSizeListArray, Float32Array, Float64Array, LargeListArray, RecordBatch,
};
use arrow::datatypes::{DataType, Field, Float64Type, Schema};
use proptest::prelude::*;
use query::{Format, TableSource};
use tables::TableWriter;

use crate::support::{Run, wave, wave_bf16};

fn close(found: f64, expected: f64) {
    assert!((found - expected).abs() <= 1e-14 * expected.abs().max(1.0), "{found:?} is not {expected:?}");
}

#[test]
fn the_bits_are_those_numpy_was_given() {
    let bits: Vec<u16> = wave(5).iter().map(|v| v.to_bits()).collect();
    assert_eq!(bits, [49345, 46441, 16625, 17136, 16114, 48263, 49408, 48240, 16139, 17138, 16615, 46546]);
    let bits: Vec<u16> = wave_bf16().chunks(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
    assert_eq!(bits, [16128, 16450, 16463, 16236, 49123, 49176, 48813, 16414, 16478, 16350, 49041, 49184]);
}

#[test]
fn functions_over_lists_of_f16_equal_numpy() {
    let run = Run::new();
    let of = |call: &str, id: &str| run.number(&format!("select {call} from latents where sample_id = '{id}'"));
    for (call, a, b) in [
        ("tensor_mean(latent)", 0.602_803_548_177_083_4, 0.628_356_933_593_75),
        ("tensor_std(latent)", 2.119_119_434_768_355_5, 2.086_455_920_384_352),
        ("tensor_norm(latent)", 7.632_068_629_021_494, 7.548_348_754_822_277),
        ("tensor_min(latent)", -2.5, -2.5),
        ("tensor_max(latent)", 3.468_75, 3.472_656_25),
        ("tensor_len(latent)", 12.0, 12.0),
    ] {
        close(of(call, "a"), a);
        close(of(call, "b"), b);
    }
    let cosine =
        "select cosine(x.latent, y.latent) from latents x, latents y where x.sample_id = 'a' and y.sample_id = 'b'";
    close(run.number(cosine), 0.294_423_869_050_460_6);
}

#[test]
fn functions_over_bf16_bytes_equal_numpy() {
    let run = Run::new();
    for (call, expected) in [
        ("tensor_mean(embedding)", 0.603_352_864_583_333_4),
        ("tensor_std(embedding)", 2.120_323_189_496_305_3),
        ("tensor_norm(embedding)", 7.636_600_112_969_147),
        ("tensor_min(embedding)", -2.5),
        ("tensor_max(embedding)", 3.468_75),
    ] {
        close(run.number(&format!("select {call} from captions")), expected);
    }
    let mixed = "select cosine(latent, embedding) from latents, captions where sample_id = 'a'";
    close(run.number(mixed), 0.999_999_159_109_884);
    // Through a subquery, an alias and a filter.
    close(
        run.number("select tensor_max(e) from (select embedding as e, text from captions) where text = 'x'"),
        3.468_75,
    );
}

#[test]
fn nan_and_null_are_told_apart() {
    let run = Run::new();
    assert_eq!(
        run.ask("select sample_id, has_nan(latent) n from latents order by 1", Format::Csv),
        "sample_id,n\na,false\nb,false\nc,true\n"
    );
    let all =
        "select tensor_mean(latent) a, tensor_min(latent) b, tensor_max(latent) c from latents where sample_id = 'c'";
    assert_eq!(run.ask(all, Format::Csv), "a,b,c\nNaN,NaN,NaN\n");
    let null = "select tensor_mean(pooled) a, has_nan(pooled) b, cosine(pooled, embedding) c, tensor_norm(null) d from captions";
    assert_eq!(run.ask(null, Format::Csv), "a,b,c,d\n,,,\n");
}

fn table(folder: &std::path::Path, columns: Vec<(Field, ArrayRef)>) -> TableSource {
    let (fields, columns): (Vec<_>, Vec<_>) = columns.into_iter().unzip();
    let batch = RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).unwrap();
    let path = folder.join("t.parquet");
    let mut writer = TableWriter::create(&path, batch.schema()).unwrap();
    writer.write(&batch).unwrap();
    writer.finish().unwrap();
    TableSource::files("t", vec![path])
}

fn ask(table: &TableSource, sql: &str) -> Result<String, query::Error> {
    let mut out = Vec::new();
    query::run(std::slice::from_ref(table), sql, Format::Csv, &mut out)?;
    Ok(String::from_utf8(out).unwrap().lines().nth(1).unwrap_or_default().to_owned())
}

#[test]
fn other_lists_and_dtypes_work() {
    let folder = tempfile::tempdir().unwrap();
    let item = Arc::new(Field::new("element", DataType::Float32, false));
    let fixed = FixedSizeListArray::new(item.clone(), 2, Arc::new(Float32Array::from(vec![3.0, 4.0])), None);
    let large = LargeListArray::from_iter_primitive::<Float64Type, _, _>([Some([Some(1.0), Some(-2.0), Some(2.0)])]);
    let bytes: Vec<u8> = [3.0f32, -4.0].iter().flat_map(|v| v.to_le_bytes()).collect();
    let described =
        Field::new("bytes", DataType::Binary, false).with_metadata([("dtype".to_owned(), "f32".to_owned())].into());
    let t = table(
        folder.path(),
        vec![
            (Field::new("fixed", DataType::FixedSizeList(item, 2), false), Arc::new(fixed) as ArrayRef),
            (Field::new("large", large.data_type_of(), true), Arc::new(large) as ArrayRef),
            (described, Arc::new(BinaryArray::from_vec(vec![&bytes])) as ArrayRef),
        ],
    );
    assert_eq!(
        ask(&t, "select tensor_norm(fixed), tensor_norm(large), tensor_min(bytes), cosine(fixed, bytes) from t")
            .unwrap(),
        "5.0,3.0,-4.0,-0.28"
    );
    let error = ask(&t, "select cosine(fixed, large) from t").unwrap_err().to_string();
    assert_eq!(error, "`cosine` of tensors of 2 and 3 values");
}

trait DataTypeOf {
    fn data_type_of(&self) -> DataType;
}

impl<A: arrow::array::Array> DataTypeOf for A {
    fn data_type_of(&self) -> DataType {
        self.data_type().clone()
    }
}

#[test]
fn what_is_no_tensor_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let odd = Field::new("odd", DataType::Binary, false).with_metadata([("dtype".to_owned(), "f32".to_owned())].into());
    let other =
        Field::new("other", DataType::Binary, false).with_metadata([("dtype".to_owned(), "int8".to_owned())].into());
    let bytes = || Arc::new(BinaryArray::from_vec(vec![b"12345"])) as ArrayRef;
    let t = table(
        folder.path(),
        vec![
            (Field::new("plain", DataType::Binary, false), bytes()),
            (odd, bytes()),
            (other, bytes()),
            (Field::new("number", DataType::Float64, false), Arc::new(Float64Array::from(vec![1.0])) as ArrayRef),
        ],
    );
    for (call, expected) in [
        (
            "tensor_mean(plain)",
            "`tensor_mean` cannot read `plain`: it is binary, and no `dtype` in the column's metadata says what its numbers are",
        ),
        ("tensor_mean(odd)", "`tensor_mean`: 5 bytes are no whole number of 4-byte values"),
        ("has_nan(other)", "`has_nan` cannot read `other`: its `dtype` is `int8`, not `bf16`, `f16` or `f32`"),
        (
            "tensor_std(number)",
            "`tensor_std` cannot read `number`: it is `Float64`, not a list of floats nor binary with a `dtype`",
        ),
    ] {
        assert_eq!(ask(&t, &format!("select {call} from t")).unwrap_err().to_string(), expected);
    }
    let error = ask(&t, "select cosine(odd) from t").unwrap_err().to_string();
    assert!(error.contains("cosine") && error.contains('2'), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]
    #[test]
    fn statistics_obey_their_definitions(values in prop::collection::vec(-1e3f64..1e3, 1..50)) {
        let folder = tempfile::tempdir().unwrap();
        let list = LargeListArray::from_iter_primitive::<Float64Type, _, _>([Some(values.iter().copied().map(Some))]);
        let t = table(folder.path(), vec![(Field::new("x", list.data_type_of(), true), Arc::new(list) as ArrayRef)]);
        let sql = "select tensor_mean(x), tensor_std(x), tensor_norm(x), tensor_min(x), tensor_max(x), cosine(x, x) from t";
        let found: Vec<f64> = ask(&t, sql).unwrap().split(',').map(|v| v.parse().unwrap()).collect();
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        // var = E[x²] - mean², norm² = n (var + mean²).
        let square = values.iter().map(|v| v * v).sum::<f64>() / n;
        let expected = [mean, (square - mean * mean).max(0.0).sqrt(), (n * square).sqrt()];
        for (found, expected) in found.iter().zip(expected) {
            prop_assert!((found - expected).abs() < 1e-4, "{} {}", found, expected);
        }
        prop_assert!(values.iter().all(|&v| found[3] <= v && v <= found[4]));
        prop_assert!((found[5] - 1.0).abs() < 1e-12);
    }
}

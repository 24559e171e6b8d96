{{/* The labels that select a role's pods. Takes (list $ "aggregator") or (list $ "party" "cleveland"). */}}
{{- define "hansa.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: hansa
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- if gt (len .) 2 }}
hansa/party: {{ index . 2 | quote }}
{{- end }}
{{- end }}

{{- define "hansa.labels" -}}
{{- $root := index . 0 -}}
{{ include "hansa.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end }}

{{- define "hansa.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{- define "hansa.url" -}}
{{- .Values.url | default (printf "https://%s-aggregator:%d" .Release.Name (int .Values.aggregator.port)) -}}
{{- end }}

{{/* Of a pod: not root, no token of the cluster, the volume handed to the image's user once. */}}
{{- define "hansa.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{/* Of a container. */}}
{{- define "hansa.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{- define "hansa.storage" -}}
accessModes: [ReadWriteOnce]
{{- with .className }}
storageClassName: {{ . | quote }}
{{- end }}
resources:
  requests:
    storage: {{ .size }}
{{- end }}

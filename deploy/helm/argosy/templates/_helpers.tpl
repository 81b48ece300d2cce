{{- define "argosy.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "argosy.fleet" -}}
{{- .Values.fleet.name | default .Release.Name -}}
{{- end -}}

{{/* Labels by which pods are selected. Takes a list: the root context and the component. */}}
{{- define "argosy.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: argosy
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Labels of an object. Takes what "argosy.selector" takes. */}}
{{- define "argosy.labels" -}}
{{- $root := index . 0 -}}
{{ include "argosy.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end -}}

{{- define "argosy.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "argosy.environment" -}}
{{- if .Values.store.url }}
- name: ARGOSY_STORE # for commands in the container
  value: {{ .Values.store.url | quote }}
{{- end }}
{{- range .Values.secretEnv }}
- name: {{ .name }}
  valueFrom:
    secretKeyRef:
      name: {{ .secret }}
      key: {{ .key }}
{{- end }}
{{- end -}}

{{- define "argosy.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "argosy.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Placement of pods. Takes the values of the component. */}}
{{- define "argosy.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Paths of the secrets in a part of the declaration that are files, one a line. */}}
{{- define "argosy.secretFiles" -}}
{{- if kindIs "map" . }}
{{- if kindIs "string" .file }}{{ .file }}{{ "\n" }}{{ end }}
{{- range $name, $value := . }}{{ if ne $name "match" }}{{ include "argosy.secretFiles" $value }}{{ end }}{{ end }}
{{- else if kindIs "slice" . }}
{{- range . }}{{ include "argosy.secretFiles" . }}{{ end }}
{{- end }}
{{- end -}}

{{/* The pod of a controller, or of the job that applies the declaration. Takes a list: the root context and the arguments. */}}
{{- define "argosy.controllerPod" -}}
{{- $root := index . 0 -}}
{{- $secret := ($root.Values.fleet.declaration.kubernetes | default dict).secret_name -}}
{{- $files := include "argosy.secretFiles" ($root.Values.fleet.declaration.alerting | default dict) | splitList "\n" | compact | uniq | sortAlpha -}}
serviceAccountName: {{ include "argosy.fullname" $root }}-controller
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- include "argosy.podSecurity" $root | nindent 2 }}
containers:
  - name: controller
    image: {{ include "argosy.image" $root }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    args: {{ toJson (index . 1) }}
    env:
      {{- include "argosy.environment" $root | trim | nindent 6 }}
    {{- with $secret }}
    envFrom:
      - secretRef:
          name: {{ . }}
    {{- end }}
    resources:
      {{- toYaml $root.Values.controller.resources | nindent 6 }}
    securityContext:
      {{- include "argosy.containerSecurity" $root | nindent 6 }}
    volumeMounts:
      - {name: fleet, mountPath: /etc/argosy, readOnly: true}
      - {name: state, mountPath: /state}
      - {name: tmp, mountPath: /tmp}
      {{- range $file := $files }}
      - {name: secrets, mountPath: {{ $file }}, subPath: {{ base $file }}, readOnly: true}
      {{- end }}
volumes:
  - name: fleet
    configMap:
      name: {{ include "argosy.fullname" $root }}-controller
  {{- if $files }}
  - name: secrets
    secret:
      secretName: {{ required "fleet.declaration.kubernetes.secret_name: alerting refers to files, so name the Secret that has them." $secret }}
  {{- end }}
  - name: state
    emptyDir: {}
  - name: tmp
    emptyDir: {}
{{- with include "argosy.placement" $root.Values.controller | trim }}
{{ . }}
{{- end }}
{{- end -}}

{{/* The declaration, with what the chart knows: its name, store and namespace, and that gateways run outside. */}}
{{- define "argosy.declaration" -}}
{{- $kubernetes := dict "namespace" .Release.Namespace -}}
{{- $known := dict "fleet" (include "argosy.fleet" .) "gateways" 0 "store" (dict "url" .Values.store.url) "kubernetes" $kubernetes -}}
{{- toYaml (mustMergeOverwrite (deepCopy .Values.fleet.declaration) $known) -}}
{{- end -}}

{{/* The settings of the gateways, with address, store and fleet. */}}
{{- define "argosy.gatewaySettings" -}}
{{- $known := dict "host" "0.0.0.0" "port" 8000 -}}
{{- if .Values.store.url -}}
{{- $_ := set $known "store" (dict "url" .Values.store.url) -}}
{{- end -}}
{{- if .Values.controller.enabled -}}
{{- $_ := set $known "fleet" (include "argosy.fleet" .) -}}
{{- end -}}
{{- toYaml (mustMergeOverwrite (deepCopy .Values.gateway.settings) $known) -}}
{{- end -}}
